//! Reads the usage object of an answer, whoever wrote it.

use memchr::memmem;
use serde::Deserialize;
use serde_json::value::RawValue;

use super::shape::{Shape, Tally, parse, tally};
use crate::policy::routing::Route;
use crate::policy::usage::cost::{nanos_of_dollars, nanos_of_ticks};
use crate::policy::usage::{Counts, Reported};

/// A larger number is no count: no call has a trillion tokens, and sums stay far from overflowing.
const LARGEST_COUNT: u64 = 1 << 40;

pub(super) fn count(value: &Shape<'_>) -> Option<u64> {
    match value {
        Shape::Count(count) if *count <= LARGEST_COUNT => Some(*count),
        _ => None,
    }
}

/// Every name that a count has at some provider. OpenAI's two sets of names (chat, responses)
/// come together at some gateways, one of them all zeros: the larger counts.
#[derive(Deserialize)]
struct Object<'a> {
    #[serde(borrow, default)]
    prompt_tokens: Shape<'a>,
    #[serde(borrow, default)]
    input_tokens: Shape<'a>,
    #[serde(borrow, default)]
    completion_tokens: Shape<'a>,
    #[serde(borrow, default)]
    output_tokens: Shape<'a>,
    #[serde(borrow, default)]
    total_tokens: Shape<'a>,
    #[serde(borrow, default)]
    prompt_tokens_details: Option<&'a RawValue>,
    #[serde(borrow, default)]
    input_tokens_details: Option<&'a RawValue>,
    #[serde(borrow, default)]
    completion_tokens_details: Option<&'a RawValue>,
    #[serde(borrow, default)]
    output_tokens_details: Option<&'a RawValue>,
    /// Perplexity's place for it.
    #[serde(borrow, default)]
    reasoning_tokens: Shape<'a>,
    /// DeepSeek; what missed the cache is the rest of `prompt_tokens`.
    #[serde(borrow, default)]
    prompt_cache_hit_tokens: Shape<'a>,
    /// Moonshot.
    #[serde(borrow, default)]
    cached_tokens: Shape<'a>,
    /// Anthropic, and gateways that pass it on.
    #[serde(borrow, default)]
    cache_read_input_tokens: Shape<'a>,
    #[serde(borrow, default)]
    cache_creation_input_tokens: Shape<'a>,
    #[serde(borrow, default)]
    cache_creation: Option<&'a RawValue>,
    /// OpenRouter: a number of dollars. Perplexity: an object.
    #[serde(borrow, default)]
    cost: Option<&'a RawValue>,
    #[serde(borrow, default)]
    cost_details: Option<&'a RawValue>,
    #[serde(borrow, default)]
    is_byok: Shape<'a>,
    /// xAI.
    #[serde(borrow, default)]
    cost_in_usd_ticks: Shape<'a>,
}

/// What `prompt_tokens` and `completion_tokens` are made of.
#[derive(Default, Deserialize)]
struct Details<'a> {
    #[serde(borrow, default)]
    cached_tokens: Shape<'a>,
    /// OpenAI since GPT-5.6, OpenRouter.
    #[serde(borrow, default)]
    cache_write_tokens: Shape<'a>,
    /// Perplexity.
    #[serde(borrow, default)]
    cache_read_input_tokens: Shape<'a>,
    /// Perplexity, Qwen.
    #[serde(borrow, default)]
    cache_creation_input_tokens: Shape<'a>,
    #[serde(borrow, default)]
    audio_tokens: Shape<'a>,
    #[serde(borrow, default)]
    reasoning_tokens: Shape<'a>,
    /// Anthropic.
    #[serde(borrow, default)]
    thinking_tokens: Shape<'a>,
}

/// Anthropic's cache writes by their lifetime.
#[derive(Default, Deserialize)]
struct CacheCreation<'a> {
    #[serde(borrow, default)]
    ephemeral_5m_input_tokens: Shape<'a>,
    #[serde(borrow, default)]
    ephemeral_1h_input_tokens: Shape<'a>,
}

/// One of the model's turns within an Anthropic answer.
#[derive(Deserialize)]
struct Iteration<'a> {
    #[serde(borrow, default, rename = "type")]
    kind: Shape<'a>,
    #[serde(borrow, default)]
    input_tokens: Shape<'a>,
    #[serde(borrow, default)]
    output_tokens: Shape<'a>,
    #[serde(borrow, default)]
    cache_read_input_tokens: Shape<'a>,
    #[serde(borrow, default)]
    cache_creation_input_tokens: Shape<'a>,
    #[serde(borrow, default)]
    cache_creation: Option<&'a RawValue>,
}

/// The turns that summed up the conversation. The counts at the top leave them out, and hold the
/// others. Source: Anthropic's *Compaction*, "Understanding usage".
#[derive(Default)]
struct Compaction(Counts);

impl<'de> Tally<'de> for Compaction {
    type Item = Iteration<'de>;

    fn add(&mut self, turn: Iteration<'de>) {
        if turn.kind.text() != Some("compaction") {
            return;
        }
        let (cache_write_5m, cache_write_1h) = lifetimes(turn.cache_creation);
        self.0.add(Counts {
            prompt: count(&turn.input_tokens),
            completion: count(&turn.output_tokens),
            cached: count(&turn.cache_read_input_tokens),
            cache_write: count(&turn.cache_creation_input_tokens),
            cache_write_5m,
            cache_write_1h,
        });
    }
}

/// OpenRouter's, where the customer's own key at the provider was used.
#[derive(Deserialize)]
struct CostDetails<'a> {
    #[serde(borrow, default)]
    upstream_inference_cost: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct CostParts<'a> {
    #[serde(borrow, default)]
    total_cost: Option<&'a RawValue>,
}

/// `null`, absent and anything odd read as empty.
fn inner<'a, T: Deserialize<'a>>(value: Option<&'a RawValue>) -> Option<T> {
    value.and_then(|value| parse(value.get().as_bytes()))
}

fn lifetimes(cache_creation: Option<&RawValue>) -> (Option<u64>, Option<u64>) {
    let by_lifetime: CacheCreation<'_> = inner(cache_creation).unwrap_or_default();
    (
        count(&by_lifetime.ephemeral_5m_input_tokens),
        count(&by_lifetime.ephemeral_1h_input_tokens),
    )
}

fn cost_nanos(object: &Object<'_>) -> Option<i64> {
    if let Some(ticks) = count(&object.cost_in_usd_ticks) {
        return nanos_of_ticks(ticks);
    }
    let cost = object.cost?.get();
    let Some(cost) = nanos_of_dollars(cost) else {
        let parts: CostParts<'_> = inner(object.cost)?;
        return nanos_of_dollars(parts.total_cost?.get());
    };
    if !object.is_byok.is_true() {
        return Some(cost);
    }
    // What OpenRouter takes is its fee only; the provider sends a bill of its own.
    let details: CostDetails<'_> = inner(object.cost_details)?;
    cost.checked_add(nanos_of_dollars(details.upstream_inference_cost?.get())?)
}

/// What the details of either side add.
#[derive(Clone, Copy, Default)]
struct Parts {
    cached: Option<u64>,
    written: Option<u64>,
    reasoning: Option<u64>,
    audio: Option<u64>,
}

impl Parts {
    fn of(details: Option<&RawValue>) -> Self {
        let details: Details<'_> = inner(details).unwrap_or_default();
        Self {
            cached: count(&details.cached_tokens).max(count(&details.cache_read_input_tokens)),
            written: count(&details.cache_write_tokens)
                .max(count(&details.cache_creation_input_tokens)),
            reasoning: count(&details.reasoning_tokens).max(count(&details.thinking_tokens)),
            audio: count(&details.audio_tokens),
        }
    }
}

/// Reads a `usage` object; empty if it is none.
fn read(usage: &RawValue) -> Reported {
    let Some(object) = parse::<Object<'_>>(usage.get().as_bytes()) else {
        return Reported::default();
    };
    let input = Parts::of(object.prompt_tokens_details.or(object.input_tokens_details));
    let details = object.completion_tokens_details;
    let output = Parts::of(details.or(object.output_tokens_details));
    let (cache_write_5m, cache_write_1h) = lifetimes(object.cache_creation);
    let cached = count(&object.prompt_cache_hit_tokens)
        .max(count(&object.cached_tokens))
        .max(count(&object.cache_read_input_tokens));
    Reported {
        counts: Counts {
            prompt: count(&object.prompt_tokens).max(count(&object.input_tokens)),
            completion: count(&object.completion_tokens).max(count(&object.output_tokens)),
            cached: cached.max(input.cached),
            cache_write: count(&object.cache_creation_input_tokens).max(input.written),
            cache_write_5m,
            cache_write_1h,
        },
        reasoning: output.reasoning.max(count(&object.reasoning_tokens)),
        total: count(&object.total_tokens),
        prompt_audio: input.audio,
        completion_audio: output.audio,
        cost_nanos: cost_nanos(&object),
        ..Reported::default()
    }
}

/// Notes a usage object on one of OpenAI's routes.
pub(super) fn note_openai(noted: &mut Reported, usage: Option<&RawValue>) {
    if let Some(usage) = usage {
        noted.update(read(usage));
    }
}

/// Notes the usage object of embeddings, which have no output.
pub(super) fn note_embeddings(noted: &mut Reported, usage: Option<&RawValue>) {
    if let Some(usage) = usage {
        noted.update(read(usage));
        noted.counts.completion.get_or_insert(0);
    }
}

/// Groq's own place for usage, in a stream's last chunk, asked for or not: `x_groq.usage`.
pub(super) fn note_groq(noted: &mut Reported, x_groq: Option<&RawValue>) {
    #[derive(Deserialize)]
    struct Groq<'a> {
        #[serde(borrow, default)]
        usage: Option<&'a RawValue>,
    }
    if let Some(groq) = inner::<Groq<'_>>(x_groq) {
        note_openai(noted, groq.usage);
    }
}

/// Notes Anthropic's usage object, of a whole answer or of `message_delta`.
pub(super) fn note_anthropic(noted: &mut Reported, usage: Option<&RawValue>) {
    #[derive(Deserialize)]
    struct Turns {
        #[serde(default, deserialize_with = "tally")]
        iterations: Compaction,
    }
    let Some(usage) = usage else { return };
    let turns: Option<Turns> = inner(Some(usage));
    noted.update(Reported {
        compaction: turns.map_or_else(Counts::default, |turns| turns.iterations.0),
        cache_on_top: true,
        ..read(usage)
    });
}

/// Notes the usage object of Anthropic's `message_start`, whose output is a token or so of what is
/// to come: that count stays unknown until `message_delta` has one.
pub(super) fn note_anthropic_start(noted: &mut Reported, usage: Option<&RawValue>) {
    let mut started = Reported::default();
    note_anthropic(&mut started, usage);
    started.counts.completion = None;
    noted.update(started);
}

/// Notes Ollama's two counts. Thinking is in the second one; the first is absent where servers
/// before 0.6 had the whole prompt in their cache.
pub(super) fn note_ollama(noted: &mut Reported, prompt_eval: &Shape<'_>, eval: &Shape<'_>) {
    noted.update(Reported {
        counts: Counts {
            prompt: count(prompt_eval),
            completion: count(eval),
            ..Counts::default()
        },
        ..Reported::default()
    });
}

/// Notes llama.cpp's counts, which every part of a stream has.
///
/// `tokens_cached` is not looked at: it is what the server holds at the end, prompt and answer.
/// What it spared shows in its timings, as `cache_n`, at older servers as the difference of
/// `tokens_evaluated` (the whole prompt) and `prompt_n` (what was worked through).
pub(super) fn note_llama_cpp(
    noted: &mut Reported,
    evaluated: &Shape<'_>,
    predicted: &Shape<'_>,
    timings: Option<&RawValue>,
) {
    #[derive(Default, Deserialize)]
    struct Timings<'a> {
        #[serde(borrow, default)]
        cache_n: Shape<'a>,
        #[serde(borrow, default)]
        prompt_n: Shape<'a>,
    }
    let timings: Timings<'_> = inner(timings).unwrap_or_default();
    let prompt = count(evaluated);
    let worked = count(&timings.prompt_n);
    let spared = prompt
        .zip(worked)
        .and_then(|(prompt, worked)| prompt.checked_sub(worked));
    noted.update(Reported {
        counts: Counts {
            prompt,
            completion: count(predicted),
            cached: count(&timings.cache_n).or(spared),
            ..Counts::default()
        },
        ..Reported::default()
    });
}

/// Notes the usage of an answer or event that was too long to be read, from its last bytes: the
/// last `usage` in them that is an object. A text cannot pass for one, since its quotes are
/// escaped.
pub(super) fn note_tail(noted: &mut Reported, route: Route, tail: &[u8]) {
    const KEY: &[u8] = br#""usage""#;
    for at in memmem::rfind_iter(tail, KEY) {
        let value = tail[at + KEY.len()..].trim_ascii_start();
        let Some(value) = value.strip_prefix(b":") else {
            continue;
        };
        let mut values = serde_json::Deserializer::from_slice(value).into_iter::<&RawValue>();
        let Some(Ok(usage)) = values.next() else {
            continue;
        };
        if !usage.get().starts_with('{') {
            continue;
        }
        return match route {
            Route::Messages => note_anthropic(noted, Some(usage)),
            Route::Embeddings => note_embeddings(noted, Some(usage)),
            _ => note_openai(noted, Some(usage)),
        };
    }
}
