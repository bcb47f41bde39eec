//! The bundled list, against the crate that it comes from and against names as they are sent.

use std::time::{Duration, UNIX_EPOCH};

use genai_prices::{Calculator, PriceRequest, Usage, UsageKey};
use jiff::Timestamp;

use super::*;
use crate::policy::money::Nanodollars;
use crate::settings::Pattern;

fn at(text: &str) -> WallTime {
    WallTime(
        text.parse::<Timestamp>()
            .expect("a timestamp")
            .as_microsecond(),
    )
}

fn now() -> WallTime {
    at("2026-10-20T12:00:00Z")
}

/// The prices of the bundled list alone.
fn bundled() -> Prices {
    Prices::new(PriceData::bundled(), &[])
}

/// What the price of a model is, in words: `openai gpt-5`, `free`, `own`, `unpriced`.
fn found(prices: &Prices, name: &str, kind: ProviderKind, base_url: &str, model: &str) -> String {
    let base_url = &Url::parse(base_url).expect("an address");
    let provider = Provider {
        name,
        kind,
        base_url,
        local: false,
    };
    match prices.price(provider, model) {
        Price::Free => "free".to_owned(),
        Price::Own { .. } => "own".to_owned(),
        Price::Listed(model) => format!("{} {}", model.seller(), model.id()),
        Price::Unpriced => "unpriced".to_owned(),
    }
}

fn at_openai(model: &str) -> String {
    let base = "https://api.openai.com/v1";
    found(&bundled(), "openai", ProviderKind::OpenAi, base, model)
}

fn at_anthropic(model: &str) -> String {
    let base = "https://api.anthropic.com";
    found(
        &bundled(),
        "anthropic",
        ProviderKind::Anthropic,
        base,
        model,
    )
}

fn at_openrouter(model: &str) -> String {
    let base = "https://openrouter.ai/api/v1";
    found(&bundled(), "openrouter", ProviderKind::OpenAi, base, model)
}

#[test]
fn a_dated_name_is_its_model() {
    assert_eq!(at_openai("gpt-4o"), "openai gpt-4o");
    assert_eq!(at_openai("gpt-4o-2024-08-06"), "openai gpt-4o");
    assert_eq!(at_openai("GPT-4o-2031-01-01"), "openai gpt-4o");
    assert_eq!(at_openai("gpt-5-20250807"), "openai gpt-5");
    assert_eq!(
        at_anthropic("claude-sonnet-4-5-20250929"),
        "anthropic claude-sonnet-4-5"
    );
    assert_eq!(
        at_anthropic("claude-sonnet-4-5@20250929"),
        "anthropic claude-sonnet-4-5"
    );
    assert_eq!(
        at_anthropic("claude-3-5-haiku-latest"),
        "anthropic claude-3-5-haiku-latest"
    );
    assert_eq!(
        at_anthropic("claude-sonnet-4-20250514"),
        "anthropic claude-sonnet-4-0"
    );
}

#[test]
fn an_unknown_version_is_unpriced() {
    for model in [
        "gpt-5.9",
        "gpt-50",
        "gpt-5-ultra",
        "totally-new-1",
        "",
        "gpt-4o-9",
    ] {
        assert_eq!(at_openai(model), "unpriced", "{model}");
    }
    for model in [
        "claude-sonnet-4-9",
        "claude-sonnet-4-9-20270101",
        "claude-haiku-4-5-1",
        "claude-3-5-sonnet-2",
        "claude-opus-9",
    ] {
        assert_eq!(at_anthropic(model), "unpriced", "{model}");
    }
    assert_eq!(at_openrouter("anthropic/claude-sonnet-4.9"), "unpriced");
}

#[test]
fn a_router_names_maker_and_model() {
    assert_eq!(
        at_openrouter("anthropic/claude-sonnet-4.5"),
        "openrouter anthropic/claude-sonnet-4.5"
    );
    assert_eq!(
        at_openrouter("openai/gpt-5:nitro"),
        "openrouter openai/gpt-5"
    );
    assert_eq!(
        at_openrouter("openai/gpt-5:online:floor"),
        "openrouter openai/gpt-5"
    );
    assert_eq!(at_openrouter("nobody/knows:free"), "free");
    assert_eq!(at_openrouter("nobody/knows:free:nitro"), "free");
    assert_eq!(at_openrouter("openai/gpt-5:unheard"), "unpriced");
}

#[test]
fn who_sells_is_told_by_address_name_prefix_and_dialect() {
    use ProviderKind::{Anthropic, Ollama, OpenAi};
    let prices = bundled();
    let found = |name, kind, base_url, model| found(&prices, name, kind, base_url, model);
    let lan = "http://gateway.internal:4000/v1";
    let gemini = "https://generativelanguage.googleapis.com/v1beta/openai";
    assert_eq!(
        found("x", OpenAi, gemini, "gemini-2.5-pro"),
        "google gemini-2.5-pro"
    );
    assert_eq!(
        found("x", OpenAi, gemini, "models/gemini-2.5-pro"),
        "google gemini-2.5-pro"
    );
    let azure = "https://my-co.openai.azure.com/openai/v1";
    assert_eq!(found("work", OpenAi, azure, "gpt-4o"), "openai gpt-4o");
    assert_eq!(found("work", OpenAi, azure, "our-deployment"), "unpriced");
    let codex = "https://chatgpt.com/backend-api/codex";
    assert_eq!(
        found("chatgpt", OpenAi, codex, "gpt-5.3-codex"),
        "openai gpt-5.3-codex"
    );
    assert_eq!(
        found("Groq", OpenAi, lan, "llama-3.1-8b-instant"),
        "groq llama-3.1-8b-instant"
    );
    assert_eq!(
        found("lite", OpenAi, lan, "anthropic/claude-opus-5"),
        "anthropic claude-opus-5"
    );
    assert_eq!(
        found("lite", OpenAi, lan, "nobody/claude-opus-5"),
        "unpriced"
    );
    assert_eq!(found("lite", OpenAi, lan, "gpt-4o"), "openai gpt-4o");
    assert_eq!(
        found("lite", Anthropic, lan, "claude-opus-5"),
        "anthropic claude-opus-5"
    );
    assert_eq!(found("vllm", OpenAi, lan, "gpt-oss-120b"), "unpriced");
    assert_eq!(found("vllm", OpenAi, lan, "qwen3-32b"), "unpriced");
    assert_eq!(
        found("cloud", Ollama, "https://ollama.com", "gpt-4o"),
        "unpriced"
    );
    let openai = "https://api.openai.com/v1";
    assert_eq!(
        found("openai", OpenAi, openai, "openai/gpt-5"),
        "openai gpt-5"
    );
}

#[test]
fn a_local_provider_costs_nothing_and_ones_own_price_wins_elsewhere() {
    let dollars = |text| Nanodollars::from_decimal(text).expect("a price");
    let own = [("my-*", "0.5", "1.5"), ("*", "7", "7")].map(|(model, input, output)| PriceRule {
        model: Pattern::new(model),
        input: dollars(input),
        output: dollars(output),
        cached_input: None,
        cache_write: None,
        cache_write_1h: None,
    });
    let prices = Prices::new(PriceData::bundled(), &own);
    let base_url = &Url::parse("https://api.openai.com/v1").expect("an address");
    let mut provider = Provider {
        name: "openai",
        kind: ProviderKind::OpenAi,
        base_url,
        local: false,
    };
    let tokens = Tokens {
        input: 1_000,
        cached_input: 1_000,
        output: 1_000,
        ..Tokens::default()
    };
    let cost = |provider, model| {
        let price = prices.price(provider, model);
        price
            .rates(now(), None)
            .expect("a price")
            .cost(&tokens)
            .to_string()
    };
    assert_eq!(cost(provider, "my-model"), "$0.0025");
    assert_eq!(cost(provider, "gpt-5"), "$0.021");
    // Its window is the list's still.
    assert_eq!(
        prices.price(provider, "gpt-5").context_window(),
        Some(400_000)
    );
    provider.local = true;
    assert_eq!(cost(provider, "my-model"), "$0.00");
}

#[test]
fn a_price_holds_in_its_season() {
    let prices = bundled();
    let base_url = &Url::parse("https://api.deepseek.com").expect("an address");
    let provider = Provider {
        name: "deepseek",
        kind: ProviderKind::OpenAi,
        base_url,
        local: false,
    };
    let input = |model: &str, time: &str| {
        let price = prices.price(provider, model);
        let rates = price.rates(at(time), None).expect("a price");
        rates.input.base.to_string()
    };
    // DeepSeek's day price from 00:30 to 16:30 UTC, its night price otherwise.
    assert_eq!(input("deepseek-chat", "2025-06-01T00:29:59Z"), "$0.135");
    assert_eq!(input("deepseek-chat", "2025-06-01T00:30:00Z"), "$0.27");
    assert_eq!(input("deepseek-chat", "2025-06-01T16:29:59Z"), "$0.27");
    assert_eq!(input("deepseek-chat", "2025-06-01T16:30:00Z"), "$0.135");
    // Two stretches of the day.
    for (time, price) in [
        ("00:59:59", "$0.15"),
        ("01:00:00", "$0.30"),
        ("04:00:00", "$0.15"),
        ("06:00:00", "$0.30"),
        ("10:00:00", "$0.15"),
    ] {
        let time = format!("2026-10-20T{time}Z");
        assert_eq!(input("deepseek-flash", &time), price, "{time}");
    }
    let openai = Url::parse("https://api.openai.com/v1").expect("an address");
    let o3 = prices.price(
        Provider {
            name: "openai",
            base_url: &openai,
            ..provider
        },
        "o3",
    );
    let o3 = |time, tier| {
        o3.rates(at(time), tier)
            .expect("a price")
            .input
            .base
            .to_string()
    };
    assert_eq!(o3("2025-06-09T23:59:59Z", None), "$10.00");
    assert_eq!(o3("2025-06-10T00:00:00Z", None), "$2.00");
    assert_eq!(o3("2026-10-20T00:00:00Z", Some("priority")), "$3.50");
    assert_eq!(o3("2026-10-20T00:00:00Z", Some("flex")), "$1.00");
    assert_eq!(o3("2026-10-20T00:00:00Z", Some("default")), "$2.00");
    assert_eq!(o3("2026-10-20T00:00:00Z", Some("unheard")), "$2.00");
    assert_eq!(o3("2026-10-11T23:59:59Z", Some("priority")), "$2.00");
}

#[test]
fn what_is_not_sold_by_the_token_is_unpriced() {
    let prices = bundled();
    let base_url = &Url::parse("https://api.openai.com/v1").expect("an address");
    let provider = Provider {
        name: "openai",
        kind: ProviderKind::OpenAi,
        base_url,
        local: false,
    };
    for model in ["whisper-1", "tts-1", "omni-moderation-latest"] {
        assert!(
            prices.price(provider, model).rates(now(), None).is_none(),
            "{model}"
        );
    }
    assert!(
        prices
            .price(provider, "text-embedding-3-small")
            .rates(now(), None)
            .is_some()
    );
}

/// The prices of the crate, for one model of one seller; `None` where it prices no tokens.
fn of_the_crate(
    seller: &str,
    model: &str,
    at: WallTime,
    tier: Option<&str>,
    tokens: &Tokens,
) -> Option<f64> {
    let count = |tokens: u64| tokens as f64;
    let usage = Usage::from([
        (UsageKey::INPUT_TOKENS, count(tokens.prompt())),
        (UsageKey::CACHE_READ_TOKENS, count(tokens.cached_input)),
        (
            UsageKey::CACHE_WRITE_TOKENS,
            count(tokens.cache_write_5m + tokens.cache_write_1h),
        ),
        (
            UsageKey::CACHE_WRITE_1H_TOKENS,
            count(tokens.cache_write_1h),
        ),
        (UsageKey::OUTPUT_TOKENS, count(tokens.output)),
        (UsageKey::OUTPUT_REASONING_TOKENS, count(tokens.reasoning)),
    ]);
    let time = UNIX_EPOCH + Duration::from_micros(at.0.unsigned_abs());
    let mut request = PriceRequest::new(model, &usage)
        .with_provider_id(seller)
        .with_timestamp(time);
    if let Some(tier) = tier {
        request = request.with_price_context("service_tier", tier);
    }
    let priced = Calculator::bundled().calculate(&request).ok()?;
    Some(priced.total_price)
}

/// Every name that the list gives literally, with its seller.
fn literal_names() -> Vec<(String, String)> {
    fn literals(rule: &serde_json::Value, names: &mut Vec<String>) {
        for (operation, argument) in rule.as_object().expect("a rule") {
            match (operation.as_str(), argument) {
                ("equals" | "starts_with" | "contains" | "ends_with", name) => {
                    names.push(name.as_str().expect("a text").to_lowercase());
                }
                ("and" | "or", rules) => {
                    for rule in rules.as_array().expect("rules") {
                        literals(rule, names);
                    }
                }
                _ => {}
            }
        }
    }
    let list: serde_json::Value =
        serde_json::from_str(include_str!("genai-prices.json")).expect("JSON");
    let mut all = Vec::new();
    for seller in list.as_array().expect("sellers") {
        let id = seller["id"].as_str().expect("an id");
        for model in seller["models"].as_array().expect("models") {
            let mut names = Vec::new();
            literals(&model["match"], &mut names);
            all.extend(names.into_iter().map(|name| (id.to_owned(), name)));
        }
    }
    all
}

#[test]
fn every_price_is_the_crates_own() {
    let prices = bundled();
    let names = literal_names();
    assert!(names.len() > 3_000, "{}", names.len());
    let base_url = &Url::parse("http://unknown.invalid").expect("an address");
    let sizes = [
        (1_000, 0, 0, 0, 100, 0),
        (32_000, 100_000, 50_000, 30_000, 70_000, 20_000),
        (600_000, 300_000, 200_000, 100_000, 100_000, 100_000),
        (1, 1, 1, 1, 1, 1),
    ];
    let times = [
        "2025-01-01T12:00:00Z",
        "2025-06-10T20:00:00Z",
        "2026-10-14T02:00:00Z",
        "2026-10-20T08:30:00Z",
        "2027-03-01T23:00:00Z",
    ];
    let (mut compared, mut unpriced, mut strict) = (0, 0, Vec::new());
    for (seller, name) in &names {
        let provider = Provider {
            name: seller,
            kind: ProviderKind::OpenAi,
            base_url,
            local: false,
        };
        let price = prices.price(provider, name);
        if matches!(price, Price::Unpriced) {
            strict.push(format!("{seller} {name}"));
            continue;
        }
        for (index, time) in times.iter().enumerate() {
            for tier in [None, Some("priority"), Some("flex")] {
                let (input, cached_input, cache_write_5m, cache_write_1h, output, reasoning) =
                    sizes[(index + usize::from(tier.is_some())) % sizes.len()];
                let tokens = Tokens {
                    input,
                    cached_input,
                    cache_write_5m,
                    cache_write_1h,
                    output,
                    reasoning,
                };
                let Some(rates) = price.rates(at(time), tier) else {
                    unpriced += 1;
                    continue;
                };
                let ours = rates.cost(&tokens);
                let theirs = of_the_crate(seller, name, at(time), tier, &tokens)
                    .unwrap_or_else(|| panic!("the crate does not know {seller} {name}"));
                let off = (ours.0 as f64 / 1e9 - theirs).abs();
                assert!(
                    off <= 1e-9 + theirs * 1e-12,
                    "{seller} {name} {time} {tier:?}: {ours}, not {theirs}"
                );
                compared += 1;
            }
        }
    }
    assert!(compared > 40_000, "{compared}, {unpriced} not by the token");
    // The few names that only a guess across a version number would price.
    assert_eq!(strict, Vec::<String>::new());
}

#[test]
fn a_list_is_taken_whole_or_not_at_all() {
    let list =
        |models: &str| format!(r#"[{{"id":"a","api_pattern":"https://a","models":[{models}]}}]"#);
    let model = |rest: &str| list(&format!(r#"{{"id":"m","match":{{"equals":"m"}},{rest}}}"#));
    let sound = model(
        r#""prices":{"input_mtok":1.5,"output_mtok":{"base":1,"tiers":[{"start":5,"price":2}]}}"#,
    );
    assert_eq!(
        PriceData::from_json(&sound).expect("sound").model_count(),
        1
    );
    for (unsound, why) in [
        ("", "EOF"),
        ("{}", "expected a sequence"),
        ("[]", "lists no model"),
        (&model(r#""prices":{"input_mtok":-1}"#), "a price of -1"),
        (
            &model(r#""prices":{"input_mtok":20000}"#),
            "a price of 20000",
        ),
        (&model(r#""prices":{"input_mtok":"1"}"#), "a price of \"1\""),
        (
            &model(r#""prices":{"input_mtok":1e400}"#),
            "a price of 1e400",
        ),
        (
            &model(r#""prices":{"input_mtok":{"base":1}}"#),
            "missing field `tiers`",
        ),
        (&model(r#""prices":[]"#), "always holds"),
        (
            &model(r#""prices":[{"prices":{}},{"prices":{}}]"#),
            "always holds",
        ),
        (
            &model(r#""prices":[{"prices":{}},{"constraint":{"weekday":"1"},"prices":{}}]"#),
            "unknown field",
        ),
        (
            &model(
                r#""prices":[{"prices":{}},{"constraint":{"start_date":"2026-02-30"},"prices":{}}]"#,
            ),
            "m: ",
        ),
        (
            &model(
                r#""prices":[{"prices":{}},{"constraint":{"start_time":"01:00:00Z"},"prices":{}}]"#,
            ),
            "neither",
        ),
        (
            &list(r#"{"id":"m","match":{"regex":"("},"prices":{}}"#),
            "cannot be read",
        ),
        (
            &list(r#"{"id":"m","match":{"rhymes":"m"},"prices":{}}"#),
            "unknown variant",
        ),
        (
            &list(
                r#"{"id":"m","match":{"equals":"m"},"prices":{}},{"id":"m","match":{"equals":"m"},"prices":{}}"#,
            ),
            "m comes twice",
        ),
    ] {
        let error = PriceData::from_json(unsound)
            .expect_err(unsound)
            .to_string();
        assert!(error.contains(why), "{error} does not say {why}");
    }
}

#[test]
fn a_list_may_have_a_night_price_and_tiers_in_any_order() {
    let list = r#"[{"id":"a","api_pattern":"https://a\\.test(/|$)","models":[{
        "id":"m","match":{"regex":"^m-\\d+$"},"prices":[
            {"prices":{"input_mtok":{"base":1,"tiers":[
                {"start":200,"price":3},{"start":100,"price":2}]}}},
            {"constraint":{"start_time":"22:00:00Z","end_time":"02:00:00Z"},
             "prices":{"input_mtok":0.5}}]}]}]"#;
    let data = PriceData::from_json(list).expect("it reads");
    let prices = Prices::new(Arc::new(data), &[]);
    let base_url = &Url::parse("https://a.test/v1").expect("an address");
    let provider = Provider {
        name: "x",
        kind: ProviderKind::OpenAi,
        base_url,
        local: false,
    };
    let input = |time| {
        let price = prices.price(provider, "m-7");
        let rates = price.rates(at(time), None).expect("a price");
        rates.input.clone()
    };
    for (time, night) in [
        ("2026-10-20T21:59:59Z", false),
        ("2026-10-20T22:00:00Z", true),
        ("2026-10-21T01:59:59Z", true),
        ("2026-10-21T02:00:00Z", false),
    ] {
        assert_eq!(
            input(time).base == Nanodollars(500_000_000),
            night,
            "{time}"
        );
    }
    let by_day = input("2026-10-20T12:00:00Z");
    let rates = [100, 101, 200, 201].map(|prompt| by_day.at(prompt).to_string());
    assert_eq!(rates, ["$1.00", "$2.00", "$2.00", "$3.00"]);
}

#[test]
fn a_list_in_another_unit_or_cut_short_does_not_replace_a_good_one() {
    let bundled = PriceData::bundled();
    bundled
        .may_replace(&bundled)
        .expect("it is as good as itself");
    let text = include_str!("genai-prices.json");
    let by_the_thousand = text
        .split(r#""input_mtok":"#)
        .map(|part| match part.find([',', '}']) {
            Some(end) if part.starts_with(|c: char| c.is_ascii_digit()) => {
                format!("{}e-3{}", &part[..end], &part[end..])
            }
            _ => part.to_owned(),
        })
        .collect::<Vec<_>>()
        .join(r#""input_mtok":"#);
    let by_the_thousand = PriceData::from_json(&by_the_thousand).expect("it reads");
    let error = by_the_thousand
        .may_replace(&bundled)
        .expect_err("another unit");
    assert!(error.to_string().contains("changed tenfold"), "{error}");
    let mut list: Vec<serde_json::Value> = serde_json::from_str(text).expect("JSON");
    list.truncate(5);
    let short = serde_json::to_string(&list).expect("JSON");
    let short = PriceData::from_json(&short).expect("it reads");
    let error = short.may_replace(&bundled).expect_err("cut short");
    assert!(error.to_string().contains("known models"), "{error}");
}

#[test]
fn what_was_found_is_remembered_and_bounded() {
    let prices = bundled();
    let base_url = &Url::parse("https://api.openai.com/v1").expect("an address");
    let provider = Provider {
        name: "openai",
        kind: ProviderKind::OpenAi,
        base_url,
        local: false,
    };
    for number in 0..MOST_FOUND + 10 {
        prices.price(provider, &format!("new-{number}"));
    }
    let remembered = || prices.found.read().unwrap()["openai"].len();
    assert_eq!(remembered(), 10);
    prices.price(provider, "new-4105");
    assert_eq!(remembered(), 10);
}
