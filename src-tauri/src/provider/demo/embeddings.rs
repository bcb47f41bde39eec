//! Embeddings: a vector made of the text's words, so that like texts lie near each other.

use axum::Json;
use axum::body::Bytes;
use axum::extract::rejection::BytesRejection;
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use super::answer;
use super::refusal::{Dialect, Refusal};

/// Dimensions if the request does not say.
const DIMENSIONS: usize = 256;

/// Most dimensions that can be asked for.
const MAX_DIMENSIONS: usize = 4096;

/// Most texts in one request, as OpenAI has it.
const MAX_INPUTS: usize = 2048;

/// `POST /v1/embeddings`
pub async fn openai(body: Result<Bytes, BytesRejection>) -> Response {
    let embedded = embed(body).await.map(|embedded| {
        let base64 = embedded.body["encoding_format"] == "base64";
        let data: Vec<Value> = embedded
            .vectors
            .iter()
            .enumerate()
            .map(|(index, vector)| {
                let embedding = if base64 {
                    let bytes: Vec<u8> = vector.iter().flat_map(|x| x.to_le_bytes()).collect();
                    json!(to_base64(&bytes))
                } else {
                    json!(vector)
                };
                json!({"object": "embedding", "index": index, "embedding": embedding})
            })
            .collect();
        json!({
            "object": "list",
            "data": data,
            "model": super::model_of(&embedded.body),
            "usage": {"prompt_tokens": embedded.tokens, "total_tokens": embedded.tokens},
        })
    });
    match embedded {
        Ok(answer) => Json(answer).into_response(),
        Err(refusal) => refusal.into_response(Dialect::OpenAi),
    }
}

/// `POST /api/embed`
pub async fn ollama(body: Result<Bytes, BytesRejection>) -> Response {
    match embed(body).await {
        Ok(embedded) => Json(json!({
            "model": super::model_of(&embedded.body),
            "embeddings": embedded.vectors,
            "total_duration": 0,
            "load_duration": 0,
            "prompt_eval_count": embedded.tokens,
        }))
        .into_response(),
        Err(refusal) => refusal.into_response(Dialect::Ollama),
    }
}

struct Embedded {
    body: Value,
    vectors: Vec<Vec<f32>>,
    tokens: usize,
}

async fn embed(body: Result<Bytes, BytesRejection>) -> Result<Embedded, Refusal> {
    let body = super::read_json(body)?;
    super::obey(&body).await?;
    let inputs = inputs(&body["input"]);
    if inputs.is_empty() || inputs.len() > MAX_INPUTS {
        let message = format!("`input` must be a text or a list of 1 to {MAX_INPUTS} texts");
        return Err(Refusal::bad_request(message));
    }
    let dimensions = answer::limit(&body["dimensions"]).unwrap_or(DIMENSIONS);
    let dimensions = dimensions.clamp(1, MAX_DIMENSIONS);
    Ok(Embedded {
        vectors: inputs.iter().map(|text| vector(text, dimensions)).collect(),
        tokens: answer::tokens(inputs.iter().map(|text| text.chars().count()).sum()),
        body,
    })
}

/// A text, texts, token numbers, or lists of those. Numbers count as words.
fn inputs(input: &Value) -> Vec<String> {
    let numbers = |list: &[Value]| {
        list.iter()
            .map(Value::to_string)
            .collect::<Vec<_>>()
            .join(" ")
    };
    match input {
        Value::String(text) => vec![text.clone()],
        Value::Array(list) if list.first().is_some_and(Value::is_number) => vec![numbers(list)],
        Value::Array(list) => list
            .iter()
            .filter_map(|item| match item {
                Value::String(text) => Some(text.clone()),
                Value::Array(list) => Some(numbers(list)),
                _ => None,
            })
            .collect(),
        _ => Vec::new(),
    }
}

/// A vector of length 1: each word adds a direction of its own.
fn vector(text: &str, dimensions: usize) -> Vec<f32> {
    let mut sum = vec![0.0_f32; dimensions];
    // The empty word gives a text without words a direction too.
    for word in text.to_lowercase().split_whitespace().chain([""]) {
        let mut state = hash(word);
        for value in &mut sum {
            // A step of splitmix64: any seed, well spread, the same on every machine.
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mut bits = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            *value += if bits >> 63 == 0 { 1.0 } else { -1.0 };
        }
    }
    let length = sum
        .iter()
        .map(|x| x * x)
        .sum::<f32>()
        .sqrt()
        .max(f32::MIN_POSITIVE);
    sum.iter().map(|x| x / length).collect()
}

/// FNV-1a.
fn hash(word: &str) -> u64 {
    word.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

/// The standard alphabet, padded.
fn to_base64(bytes: &[u8]) -> String {
    const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for group in bytes.chunks(3) {
        let byte = |n: usize| u32::from(group.get(n).copied().unwrap_or(0));
        let bits = byte(0) << 16 | byte(1) << 8 | byte(2);
        for n in 0..4 {
            // A group of one byte fills two letters, one of two bytes three.
            if n <= group.len() {
                text.push(char::from(ALPHABET[(bits >> (18 - 6 * n) & 63) as usize]));
            } else {
                text.push('=');
            }
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base64_as_rfc_4648_has_it() {
        for (plain, coded) in [
            ("", ""),
            ("f", "Zg=="),
            ("fo", "Zm8="),
            ("foo", "Zm9v"),
            ("foob", "Zm9vYg=="),
            ("fooba", "Zm9vYmE="),
            ("foobar", "Zm9vYmFy"),
        ] {
            assert_eq!(to_base64(plain.as_bytes()), coded);
        }
        assert_eq!(to_base64(&[0xfb, 0xff]), "+/8=");
    }

    #[test]
    fn like_texts_lie_near_each_other() {
        let near = |a: &str, b: &str| -> f32 {
            vector(a, 512)
                .iter()
                .zip(vector(b, 512))
                .map(|(a, b)| a * b)
                .sum()
        };
        assert!((near("the cat sat", "The cat  sat") - 1.0).abs() < 1e-3);
        assert!(near("the cat sat", "the cat ran") > near("the cat sat", "stocks fell sharply"));
        assert!((near("", "") - 1.0).abs() < 1e-3);
    }

    #[test]
    fn every_form_of_input() {
        for (input, texts) in [
            (json!("a"), 1),
            (json!(["a", "b"]), 2),
            (json!([1, 2, 3]), 1),
            (json!([[1], [2, 3]]), 2),
            (json!([]), 0),
            (json!(null), 0),
        ] {
            assert_eq!(inputs(&input).len(), texts, "{input}");
        }
    }
}
