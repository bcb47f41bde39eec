//! Answers as providers send them, and what they come to: every provider's way of counting, with
//! the number.

use super::*;
use crate::policy::routing::Route;
use crate::policy::tap::{Encoding, Framing, Tap};

/// Reads an answer in pieces of `size`.
fn reported(route: Route, framing: Framing, body: &[u8], size: usize) -> Reported {
    let mut tap = Tap::new(route, framing, Encoding::Identity, 200);
    body.chunks(size.max(1)).for_each(|chunk| tap.feed(chunk));
    tap.finish().usage
}

fn usage_of(route: Route, framing: Framing, body: &[u8], flavour: Flavour) -> Usage {
    let whole = reported(route, framing, body, body.len());
    for size in [1, 3, 100] {
        assert_eq!(
            reported(route, framing, body, size),
            whole,
            "in pieces of {size}"
        );
    }
    whole.usage(flavour).expect("usage was said")
}

/// A fixture's usage: its route and framing show in its name.
macro_rules! usage {
    ($name:literal) => {
        usage!($name, Flavour::Plain)
    };
    ($name:literal, $flavour:expr) => {{
        let body = include_bytes!(concat!("fixtures/", $name));
        let (route, framing) = by_name($name);
        usage_of(route, framing, body, $flavour)
    }};
}

fn by_name(name: &str) -> (Route, Framing) {
    let (stem, form) = name.split_once('.').expect("a file's form");
    let framing = match form {
        "sse" => Framing::Sse,
        "ndjson" => Framing::Ndjson,
        _ => Framing::Json,
    };
    let routes = [
        ("ollama_chat", Route::OllamaChat),
        ("ollama_generate", Route::OllamaGenerate),
        ("ollama_embed", Route::OllamaEmbed),
        ("llama_cpp_completion", Route::LlamaCompletion),
        ("_messages", Route::Messages),
        ("_compact", Route::ResponsesCompact),
        ("_responses", Route::Responses),
        ("_completions", Route::Completions),
        ("_embeddings", Route::Embeddings),
        ("_chat", Route::ChatCompletions),
    ];
    let (_, route) = routes
        .into_iter()
        .find(|(part, _)| stem.contains(part))
        .expect("a known route");
    (route, framing)
}

/// Fresh and cached input, output and reasoning, the provider's counts.
fn plain(input: u64, cached: Option<u64>, output: u64, reasoning: Option<u64>) -> Usage {
    Usage {
        input: Some(input),
        cached_input: cached,
        output: Some(output),
        reasoning,
        ..Usage::default()
    }
}

/// OpenAI's details say of sound that there was none.
fn silent(usage: Usage) -> Usage {
    Usage {
        input_audio: Some(0),
        output_audio: Some(0),
        ..usage
    }
}

#[test]
fn openai_cached_input_and_reasoning_are_parts() {
    assert_eq!(
        usage!("openai_chat.json"),
        silent(plain(2008, Some(0), 266, Some(261)))
    );
    assert_eq!(
        usage!("openai_chat.sse"),
        silent(plain(50, Some(100_000), 500, Some(0)))
    );
    let written = usage!("openai_chat_cache_write.json");
    assert_eq!(
        written,
        Usage {
            cache_write_5m: Some(3000),
            // For how long it does not say.
            basis: Basis::Doubtful,
            ..silent(plain(1000, Some(1000), 100, Some(0)))
        }
    );
    assert_eq!(written.whole_input(), Some(5000));
    let spoken = usage!("openai_chat_audio.json");
    assert_eq!((spoken.input, spoken.input_audio), (Some(40), Some(30)));
    assert_eq!((spoken.output, spoken.output_audio), (Some(90), Some(80)));
}

#[test]
fn openai_other_routes() {
    assert_eq!(usage!("openai_completions.json"), plain(5, None, 7, None));
    assert_eq!(usage!("openai_completions.sse"), plain(6, None, 8, None));
    assert_eq!(
        usage!("openai_responses.json"),
        plain(28, Some(300), 52, Some(10))
    );
    assert_eq!(
        usage!("openai_responses.sse"),
        plain(11, Some(0), 1035, Some(832))
    );
    assert_eq!(
        usage!("openai_responses_incomplete.sse"),
        plain(14, Some(0), 16, Some(16))
    );
    assert_eq!(
        usage!("openai_responses_failed.sse"),
        plain(21, Some(0), 5, Some(0))
    );
    assert_eq!(
        usage!("openai_responses_compact.json"),
        plain(139, Some(0), 438, Some(64))
    );
    assert_eq!(usage!("openai_embeddings.json"), plain(8, None, 0, None));
    assert_eq!(usage!("voyage_embeddings.json"), plain(10, None, 0, None));
}

#[test]
fn anthropic_cache_comes_on_top() {
    let usage = usage!("anthropic_messages.json");
    assert_eq!(
        usage,
        Usage {
            cache_write_5m: Some(1000),
            cache_write_1h: Some(4000),
            ..plain(50, Some(100_000), 500, None)
        }
    );
    assert_eq!(usage.whole_input(), Some(105_050));
    assert_eq!(
        usage!("anthropic_messages_no_lifetime.json"),
        Usage {
            cache_write_5m: Some(2000),
            basis: Basis::Doubtful,
            ..plain(50, Some(100_000), 500, None)
        }
    );
}

#[test]
fn anthropic_deltas_are_sums_and_absent_or_null_keeps() {
    let written = |usage, write_5m, write_1h| Usage {
        cache_write_5m: write_5m,
        cache_write_1h: write_1h,
        ..usage
    };
    assert_eq!(
        usage!("anthropic_messages.sse"),
        written(plain(16, Some(300), 15, None), Some(20), Some(0))
    );
    // Reading what a search brought raises the input.
    assert_eq!(
        usage!("anthropic_messages_search.sse"),
        written(plain(10_682, Some(0), 510, None), Some(0), None)
    );
    assert_eq!(usage!("ollama_messages.sse"), plain(26, None, 31, None));
    // The output of the start is no count of what was sent after it.
    let broken = usage!("anthropic_messages_broken.sse");
    assert_eq!(
        (broken.input, broken.cached_input, broken.output),
        (Some(16), Some(300), None)
    );
    assert!(!broken.is_complete());
}

#[test]
fn anthropic_compaction_is_paid_too() {
    assert_eq!(
        usage!("anthropic_messages_compaction.json"),
        Usage {
            cache_write_5m: Some(0),
            ..plain(203_000, Some(15), 4500, None)
        }
    );
}

#[test]
fn ollama_and_llama_cpp() {
    assert_eq!(usage!("ollama_chat.ndjson"), plain(26, None, 298, None));
    assert_eq!(usage!("ollama_generate.json"), plain(26, None, 290, None));
    assert_eq!(usage!("ollama_embed.json"), plain(8, None, 0, None));
    // Not its `tokens_cached`, 104, which is more than the whole prompt.
    assert_eq!(
        usage!("llama_cpp_completion.json"),
        plain(4, Some(37), 64, None)
    );
    assert_eq!(
        usage!("llama_cpp_completion.sse"),
        plain(6, Some(8), 16, None)
    );
    // Broken off, it has counted as far as it came.
    let body = include_str!("fixtures/llama_cpp_completion.sse");
    let first = body.split_inclusive("\n\n").next().expect("an event");
    let (route, framing) = by_name("llama_cpp_completion.sse");
    let usage = usage_of(route, framing, first.as_bytes(), Flavour::Plain);
    assert_eq!(usage, plain(14, None, 1, None));
}

#[test]
fn openrouter_says_the_cost() {
    let costing = |usage, nanos| Usage {
        cost_nanos: Some(nanos),
        cache_write_5m: Some(0),
        ..silent(usage)
    };
    assert_eq!(
        usage!("openrouter_chat.json"),
        costing(plain(21, Some(10_318), 60, Some(0)), 1_409_550)
    );
    // Its own fee, and the provider's price on the customer's own bill.
    assert_eq!(
        usage!("openrouter_chat_byok.json"),
        costing(plain(21, Some(10_318), 60, Some(0)), 70_478 + 1_409_550)
    );
    // Usage in the last chunk with a choice, the cost with an exponent.
    let streamed = usage!("openrouter_chat.sse");
    assert_eq!(streamed.cost_nanos, Some(1960));
    assert_eq!(
        (streamed.input, streamed.cache_write_5m),
        (Some(94), Some(100))
    );
    assert_eq!(usage!("perplexity_chat.json").cost_nanos, Some(5_044_000));
}

#[test]
fn providers_on_the_chat_route() {
    assert_eq!(
        usage!("deepseek_chat.json"),
        plain(176, Some(1024), 300, Some(250))
    );
    assert_eq!(
        usage!("deepseek_chat_older.json"),
        plain(176, Some(1024), 300, None)
    );
    assert_eq!(usage!("groq_chat.sse"), plain(6, Some(12), 556, None));
    assert_eq!(usage!("groq_chat_asked.sse"), plain(6, Some(12), 556, None));
    assert_eq!(
        usage!("mistral_chat.sse", Flavour::Mistral),
        plain(13, None, 23, None)
    );
    assert_eq!(
        usage!("moonshot_chat.sse"),
        plain(941, Some(2048), 13, None)
    );
    assert_eq!(
        usage!("azure_chat.sse"),
        silent(plain(9, Some(0), 2, Some(0)))
    );
    assert_eq!(usage!("vllm_chat_continuous.sse"), plain(9, None, 2, None));
    assert_eq!(
        usage!("gateway_two_names_chat.json"),
        plain(21, Some(0), 6, Some(0))
    );
    assert_eq!(
        usage!("gateway_cache_beside_chat.json"),
        plain(50, Some(100_000), 500, None)
    );
}

#[test]
fn xai_reasoning_comes_on_top() {
    for flavour in [Flavour::Xai, Flavour::Plain] {
        let usage = usage!("xai_chat.json", flavour);
        assert_eq!(
            usage,
            Usage {
                cost_nanos: Some(3_775_600),
                ..silent(plain(26, Some(6), 103, Some(94)))
            }
        );
        // Every chunk has the sum so far.
        let streamed = usage!("xai_chat.sse", flavour);
        assert_eq!(
            (streamed.output, streamed.cost_nanos),
            (Some(103), Some(194))
        );
    }
    let output = |flavour| usage!("xai_chat_no_total.json", flavour).output;
    assert_eq!(output(Flavour::Xai), Some(194));
    assert_eq!(output(Flavour::Plain), Some(100));
}

#[test]
fn gemini_thinking_is_in_the_total_only() {
    assert_eq!(
        usage!("gemini_chat.json", Flavour::Gemini),
        plain(20, None, 533, Some(382))
    );
    assert_eq!(
        usage!("gemini_chat.sse", Flavour::Gemini),
        plain(1000, Some(4000), 412, Some(400))
    );
    // Elsewhere such a total is odd; it is paid all the same.
    let elsewhere = usage!("gemini_chat.json");
    assert_eq!(
        (elsewhere.output, elsewhere.basis),
        (Some(533), Basis::Doubtful)
    );
}

/// Counts on the chat route; zero stands for absent.
fn chat(prompt: u64, cached: u64, completion: u64, reasoning: u64, total: u64) -> Usage {
    let count = |count| Some(count).filter(|count| *count > 0);
    let reported = Reported {
        counts: Counts {
            prompt: count(prompt),
            completion: count(completion),
            cached: count(cached),
            ..Counts::default()
        },
        reasoning: count(reasoning),
        total: count(total),
        ..Reported::default()
    };
    reported.usage(Flavour::Plain).expect("counts")
}

#[test]
fn the_total_decides_what_is_within_what() {
    // prompt, cached, completion, reasoning, total; input, output, basis
    for (counts, input, output, basis) in [
        ([2008, 0, 266, 261, 2274], 2008, 266, Basis::Reported),
        ([100, 0, 20, 500, 620], 100, 520, Basis::Reported),
        ([100, 60, 20, 10, 120], 40, 20, Basis::Reported),
        ([100, 60, 20, 10, 190], 100, 30, Basis::Reported),
        // A part larger than the whole lies beside it.
        ([21, 0, 1, 60, 82], 21, 61, Basis::Reported),
        ([100, 0, 20, 500, 0], 100, 520, Basis::Reported),
        ([50, 100, 20, 0, 0], 50, 20, Basis::Reported),
        // Nothing adds up.
        ([100, 0, 20, 500, 700], 100, 600, Basis::Doubtful),
        ([100, 0, 600, 500, 900], 100, 800, Basis::Doubtful),
        ([100, 60, 20, 10, 5], 40, 20, Basis::Doubtful),
        ([21, 0, 1, 60, 22], 21, 61, Basis::Doubtful),
        // The total stands in for a side.
        ([100, 10, 0, 0, 130], 90, 30, Basis::Reported),
        ([0, 10, 30, 0, 130], 90, 30, Basis::Reported),
    ] {
        let [prompt, cached, completion, reasoning, total] = counts;
        let usage = chat(prompt, cached, completion, reasoning, total);
        let read = (usage.input, usage.output, usage.basis);
        assert_eq!(read, (Some(input), Some(output), basis), "{counts:?}");
    }
    let lone = chat(100, 30, 0, 0, 0);
    assert_eq!((lone.input, lone.output), (Some(70), None));
}

#[test]
fn odd_usage_is_none_and_hides_nothing() {
    let chat = |usage: &str| {
        let body = format!(
            r#"data: {{"choices":[{{"index":0,"delta":{{"content":"Hi"}},"finish_reason":"stop"}}],"usage":{usage},"x_groq":{usage}}}

"#
        );
        let mut tap = Tap::new(
            Route::ChatCompletions,
            Framing::Sse,
            Encoding::Identity,
            200,
        );
        tap.feed(body.as_bytes());
        let reading = tap.finish();
        assert!(reading.has_content && reading.keepable(), "{usage}");
        reading.usage.usage(Flavour::Plain)
    };
    for usage in [
        "null",
        "true",
        "7",
        "\"usage\"",
        "[]",
        "{}",
        r#"{"prompt_tokens":null,"completion_tokens":-1,"total_tokens":"12"}"#,
        r#"{"prompt_tokens":18446744073709551615}"#,
        r#"{"prompt_tokens_details":[],"cost":"free","iterations":{}}"#,
    ] {
        assert_eq!(chat(usage), None, "{usage}");
    }
    let partly =
        chat(r#"{"prompt_tokens":3,"completion_tokens":4,"prompt_tokens_details":"none"}"#);
    assert_eq!(partly, Some(plain(3, None, 4, None)));
}

#[test]
fn zeros_after_counts_take_nothing_back() {
    let body =
        br#"data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":4,"total_tokens":7}}

data: {"choices":[],"usage":{"prompt_tokens":0,"completion_tokens":0,"total_tokens":0}}

"#;
    let usage = usage_of(Route::ChatCompletions, Framing::Sse, body, Flavour::Plain);
    assert_eq!(usage, plain(3, None, 4, None));
}

#[test]
fn usage_at_the_end_of_what_is_too_long_to_read() {
    let filler = vec![b'1'; 1 << 20];
    let long = |route, framing, before: &str, after: &str| {
        let mut tap = Tap::new(route, framing, Encoding::Identity, 200);
        tap.feed(before.as_bytes());
        (0..9).for_each(|_| tap.feed(&filler));
        tap.feed(after.as_bytes());
        tap.finish().usage.usage(Flavour::Plain)
    };
    let usage = long(
        Route::Embeddings,
        Framing::Json,
        r#"{"data":[{"embedding":[0."#,
        r#"]}],"model":"m","usage":{"prompt_tokens":8000,"total_tokens":8000}}"#,
    );
    assert_eq!(usage, Some(plain(8000, None, 0, None)));
    let usage = long(
        Route::Responses,
        Framing::Sse,
        "event: response.completed\ndata: {\"response\":{\"output\":[{\"result\":\"",
        "\"}],\"usage\" : {\"input_tokens\":7,\"output_tokens\":5},\"metadata\":{\"usage\":\"x\"}}}\n\n",
    );
    assert_eq!(usage, Some(plain(7, None, 5, None)));
    let quoted = long(
        Route::ChatCompletions,
        Framing::Json,
        r#"{"choices":[{"message":{"content":""#,
        r#"\"usage\":{\"prompt_tokens\":1}"}}],"usage":nonsense}"#,
    );
    assert_eq!(quoted, None);
    // In one chunk.
    let mut tap = Tap::new(Route::Embeddings, Framing::Json, Encoding::Identity, 200);
    let body = format!(
        r#"{{"data":[0.{}],"usage":{{"total_tokens":9}}}}"#,
        "1".repeat(9 << 20)
    );
    tap.feed(body.as_bytes());
    assert_eq!(
        tap.finish().usage.usage(Flavour::Plain),
        Some(plain(9, None, 0, None))
    );
}

#[test]
fn hosts() {
    for (host, flavour) in [
        ("api.x.ai", Flavour::Xai),
        ("API.X.AI.", Flavour::Xai),
        ("max.ai", Flavour::Plain),
        ("generativelanguage.googleapis.com", Flavour::Gemini),
        ("us-central1-aiplatform.googleapis.com", Flavour::Gemini),
        ("api.mistral.ai", Flavour::Mistral),
        ("openrouter.ai", Flavour::OpenRouter),
        ("openrouter.ai.example.com", Flavour::Plain),
        ("api.openai.com", Flavour::Plain),
        ("127.0.0.1", Flavour::Plain),
    ] {
        assert_eq!(Flavour::of(host), flavour, "{host}");
    }
}
