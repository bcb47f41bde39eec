//! The most that a call can cost, known before it is made.
//!
//! The prompt is bounded by its bytes. The tokenizers in use are byte-level BPE (OpenAI, Anthropic,
//! Llama 3, Qwen, DeepSeek) or fall back to bytes (SentencePiece: Gemini, Mistral), and a token of
//! either covers at least one byte of text; JSON never writes a text in fewer bytes than it has.
//! What a provider adds to a prompt is allowed for in [`PREAMBLE`]. English runs to four bytes a
//! token, so the bound is generous; but it holds, and what was reserved too much comes back when
//! the call settles.
//!
//! Not covered: what tools cost that the provider runs itself, such as a web search.

use super::Worst;
use crate::clock::WallTime;
use crate::policy::money::Nanodollars;
use crate::policy::price::{Price, Rates, Tokens};

/// Tokens that a provider adds to a prompt: Anthropic's system prompt for tools takes up to about
/// 800, its built-in tools as many again each, and a chat template three or four a message, which
/// the JSON around the message outweighs.
const PREAMBLE: u64 = 2_048;

/// Tokens that a picture or a file within the body can take beyond its bytes: the tiniest PNG is
/// shorter than the tile that is billed for it.
const ATTACHMENT: u64 = 2_048;

/// Which prices of the prompt cache a call can come to pay.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum CacheWrites {
    /// None: the body does not ask for it, and its dialect writes only when asked.
    None,
    /// That of five minutes, or the one that providers charge unasked.
    Short,
    /// That of an hour too. What a call is taken for where nobody looked.
    #[default]
    Long,
}

/// What is known of a call before it goes out.
#[derive(Clone, Copy, Debug, Default)]
pub struct Request<'a> {
    /// The length of the body as the provider reads it, decompressed.
    pub body_bytes: u64,
    /// Pictures, sounds and files within the body.
    pub attachments: u64,
    /// It refers to content that is not in the body: a URL, a file's id, an earlier response.
    pub refers_outside: bool,
    /// The most tokens it wants for one answer: `max_tokens`, `max_completion_tokens`,
    /// `max_output_tokens`, `num_predict`.
    pub max_output: Option<u64>,
    /// How many answers it wants: `n`, or `best_of` if that is more. Zero counts as one.
    pub choices: u64,
    /// What it can write to the prompt cache.
    pub cache_writes: CacheWrites,
    /// The `service_tier` that it names.
    pub service_tier: Option<&'a str>,
}

impl Request<'_> {
    /// The most tokens of its prompt and of its answers, in a model with this window.
    fn bounds(&self, context_window: Option<u64>, output_bound: u32) -> (u64, u64) {
        let window = context_window.unwrap_or(u64::MAX);
        let bytes = self
            .body_bytes
            .saturating_add(PREAMBLE)
            .saturating_add(self.attachments.saturating_mul(ATTACHMENT));
        let prompt = match context_window {
            Some(window) if self.refers_outside => window,
            _ => bytes.min(window),
        };
        let answer = self
            .max_output
            .unwrap_or(u64::from(output_bound))
            .min(window);
        (prompt, answer.saturating_mul(self.choices.max(1)))
    }

    /// The most that it can cost at this price, for a call that is paid by its use.
    ///
    /// `output_bound` is the setting `output_bound_tokens`. A tier named `auto` is the provider's
    /// to choose, so the dearest that is listed counts.
    pub fn worst_case(&self, price: &Price, output_bound: u32, at: WallTime) -> Worst {
        match price {
            Price::Free => Worst::Nothing,
            _ => self
                .dearest_cost(price, output_bound, at)
                .map_or(Worst::Unknown, Worst::AtMost),
        }
    }

    fn dearest_cost(&self, price: &Price, output_bound: u32, at: WallTime) -> Option<Nanodollars> {
        let (prompt, answer) = self.bounds(price.context_window(), output_bound);
        let cost = |tier| {
            let rates = price.rates(at, tier)?;
            Some(self.dearest(&rates, prompt).cost(&Tokens {
                input: prompt,
                output: answer,
                ..Tokens::default()
            }))
        };
        let named = cost(self.service_tier)?;
        if self.service_tier != Some("auto") {
            return Some(named);
        }
        let tiers = match price {
            Price::Listed(model) => model.tiers().filter_map(|tier| cost(Some(tier))).max(),
            Price::Free | Price::Own { .. } | Price::Unpriced => None,
        };
        Some(tiers.map_or(named, |dearest| dearest.max(named)))
    }

    /// Prices at which every token of a prompt up to this size costs as much as any could.
    fn dearest(&self, rates: &Rates, prompt: u64) -> Rates {
        let mut input = rates
            .input
            .dearest(prompt)
            .max(rates.cached_input.dearest(prompt));
        if self.cache_writes >= CacheWrites::Short {
            input = input.max(rates.cache_write_5m.dearest(prompt));
        }
        if self.cache_writes == CacheWrites::Long {
            input = input.max(rates.cache_write_1h.dearest(prompt));
        }
        let output = rates
            .output
            .dearest(prompt)
            .max(rates.reasoning.dearest(prompt));
        Rates {
            calls: rates.calls,
            ..Rates::plain(input, output)
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use url::Url;

    use super::*;
    use crate::policy::price::{PriceData, Prices, Provider, Scale};
    use crate::settings::ProviderKind;

    fn now() -> WallTime {
        WallTime(1_792_500_000_000_000) // 2026-10-20
    }

    fn price(model: &str) -> Price {
        let base_url = &Url::parse("http://gateway.invalid").expect("an address");
        let provider = Provider {
            name: "gateway",
            kind: ProviderKind::OpenAi,
            base_url,
            local: false,
        };
        Prices::new(PriceData::bundled(), &[]).price(provider, model)
    }

    fn worst(request: Request<'_>, model: &str) -> String {
        match request.worst_case(&price(model), 8_192, now()) {
            Worst::Nothing => "nothing".to_owned(),
            Worst::AtMost(worst) => worst.to_string(),
            Worst::Unknown => "unpriced".to_owned(),
        }
    }

    #[test]
    fn a_limit_is_taken_at_its_word_and_a_missing_one_from_the_settings() {
        let request = Request {
            body_bytes: 1_000_000 - PREAMBLE,
            cache_writes: CacheWrites::None,
            ..Request::default()
        };
        // The window of gpt-4o is 128,000: at $2.50 in and $10.00 out.
        assert_eq!(worst(request, "openai/gpt-4o"), "$0.40192");
        let limited = Request {
            max_output: Some(1_000),
            ..request
        };
        assert_eq!(worst(limited, "openai/gpt-4o"), "$0.33");
        assert_eq!(
            worst(
                Request {
                    choices: 4,
                    ..limited
                },
                "openai/gpt-4o"
            ),
            "$0.36"
        );
        let beyond = Request {
            max_output: Some(u64::MAX),
            ..request
        };
        assert_eq!(worst(beyond, "openai/gpt-4o"), "$1.60");
        assert_eq!(worst(request, "nobody/knows"), "unpriced");
    }

    #[test]
    fn the_dearest_class_and_tier_in_reach_count() {
        let request = Request {
            body_bytes: 200_000 - PREAMBLE,
            max_output: Some(1_000),
            cache_writes: CacheWrites::None,
            ..Request::default()
        };
        // claude-sonnet-4-6 in 2025 had a step at 200,000 tokens: $3 and $6 in, $15 and $22.50 out.
        let then = WallTime(1_760_000_000_000_000);
        let price_then = price("anthropic/claude-sonnet-4-6");
        let worst_then = |request: Request<'_>| {
            let worst = request.dearest_cost(&price_then, 8_192, then);
            worst.expect("a price").to_string()
        };
        assert_eq!(worst_then(request), "$0.615");
        let longer = Request {
            body_bytes: request.body_bytes + 1,
            ..request
        };
        assert_eq!(worst_then(longer), "$1.222506");
        // Writes cost 1.25 and 2 times as much.
        let written = |cache_writes| Request {
            cache_writes,
            ..request
        };
        let opus = "anthropic/claude-opus-5";
        assert_eq!(worst(written(CacheWrites::None), opus), "$1.025");
        assert_eq!(worst(written(CacheWrites::Short), opus), "$1.275");
        assert_eq!(worst(written(CacheWrites::Long), opus), "$2.025");
        let outside = Request {
            refers_outside: true,
            ..request
        };
        assert_eq!(worst(outside, opus), "$5.025");
    }

    #[test]
    fn whichever_class_is_dearest_counts() {
        let flat = |dollars: i64| Scale::flat(Nanodollars(dollars * 1_000_000_000));
        let rates = Rates {
            input: flat(1),
            cached_input: flat(2),
            cache_write_5m: flat(3),
            cache_write_1h: flat(4),
            output: flat(5),
            reasoning: flat(6),
            calls: Nanodollars(7),
        };
        for (cache_writes, input) in [
            (CacheWrites::None, 2),
            (CacheWrites::Short, 3),
            (CacheWrites::Long, 4),
        ] {
            let request = Request {
                cache_writes,
                ..Request::default()
            };
            let dearest = request.dearest(&rates, 1);
            assert_eq!(dearest.input, flat(input));
            assert_eq!((dearest.output, dearest.calls), (flat(6), Nanodollars(7)));
        }
    }

    #[test]
    fn a_service_tier_may_cost_more() {
        let request = |service_tier| Request {
            body_bytes: 100_000 - PREAMBLE,
            max_output: Some(1_000),
            cache_writes: CacheWrites::None,
            service_tier,
            ..Request::default()
        };
        let o3 = |tier| worst(request(tier), "openai/o3");
        assert_eq!(o3(None), "$0.208");
        assert_eq!(o3(Some("flex")), "$0.104");
        assert_eq!(o3(Some("priority")), "$0.364");
        assert_eq!(o3(Some("auto")), "$0.364");
    }

    proptest! {
        #[test]
        fn no_call_costs_more_than_its_worst_case(
            model in prop::sample::select(vec![
                "openai/gpt-5", "openai/gpt-6-sol", "anthropic/claude-sonnet-4-5",
                "anthropic/claude-haiku-5-5", "google/gemini-2.5-pro", "deepseek/deepseek-chat",
                "perplexity/sonar-deep-research", "x-ai/grok-4.5",
            ]),
            body_bytes in 0_u64..2_000_000,
            max_output in prop::option::of(0_u64..200_000),
            choices in 0_u64..4,
            shares in prop::array::uniform5(0_u64..=100),
            writes in prop::sample::select(vec![
                CacheWrites::None, CacheWrites::Short, CacheWrites::Long,
            ]),
            hour in 0_i64..24,
        ) {
            let request = Request {
                body_bytes, max_output, choices, cache_writes: writes, ..Request::default()
            };
            let price = price(model);
            let at = WallTime(now().0 + hour * 3_600_000_000);
            let (prompt, answer) = request.bounds(price.context_window(), 8_192);
            // Any split of any prompt and answer within the bounds.
            let of = |whole: u64, share: u64| whole * share / 100;
            let mut left = of(prompt, shares[0]);
            let mut take = |share| {
                let taken = of(left, share);
                left -= taken;
                taken
            };
            let cache_write_1h = if writes == CacheWrites::Long { take(shares[1]) } else { 0 };
            let cache_write_5m = if writes >= CacheWrites::Short { take(shares[2]) } else { 0 };
            let cached_input = take(shares[3]);
            let output = of(answer, shares[4]);
            let tokens = Tokens {
                input: left, cached_input, cache_write_5m, cache_write_1h, output,
                reasoning: of(output, shares[3]),
            };
            let cost = price.rates(at, None).unwrap().cost(&tokens);
            let worst = request.dearest_cost(&price, 8_192, at).unwrap();
            prop_assert!(cost <= worst, "{} > {}", cost, worst);
        }
    }
}
