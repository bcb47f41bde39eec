//! OpenAI's `embeddings`.

use serde::Deserialize;
use serde_json::value::RawValue;

use super::shape::{Filled, Shape, parse};
use super::{Learned, Stop, usage};

#[derive(Deserialize)]
struct Embeddings<'a> {
    #[serde(borrow, default)]
    model: Shape<'a>,
    #[serde(default)]
    data: Option<Filled>,
    #[serde(borrow, default)]
    error: Option<&'a RawValue>,
    #[serde(borrow, default)]
    usage: Option<&'a RawValue>,
}

pub(super) fn read(learned: &mut Learned, answer: &[u8]) {
    let Some(answer) = parse::<Embeddings<'_>>(answer) else {
        return;
    };
    learned.note_model(&answer.model);
    learned.note_error_field(answer.error);
    usage::note_embeddings(&mut learned.usage, answer.usage);
    if let Some(Filled(any)) = answer.data {
        learned.output |= any;
        learned.note_stop(Stop::Natural);
    }
}
