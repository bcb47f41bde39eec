//! What the tokens of one call cost.

use std::sync::Arc;

use serde::Serialize;

use crate::policy::money::{Nanodollars, divide_half_even};

/// Rates are for so many tokens.
const PER: u128 = 1_000_000;

/// The tokens of one call, each in one class only.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tokens {
    /// Read afresh: neither found in a cache nor written to one.
    pub input: u64,
    /// Found in the provider's prompt cache.
    pub cached_input: u64,
    /// Written to it for five minutes, or for a time not stated.
    pub cache_write_5m: u64,
    /// Written to it for an hour.
    pub cache_write_1h: u64,
    /// Everything billed as output, reasoning included.
    pub output: u64,
    /// The part of `output` that was reasoning.
    pub reasoning: u64,
}

impl Tokens {
    /// The size of the prompt, by which long-context prices are chosen.
    pub fn prompt(&self) -> u64 {
        self.input
            .saturating_add(self.cached_input)
            .saturating_add(self.cache_write_5m)
            .saturating_add(self.cache_write_1h)
    }
}

/// Dollars a million tokens, by the size of the prompt.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Scale {
    /// What a short prompt pays.
    pub base: Nanodollars,
    /// What longer ones pay instead, for all of their tokens; the thresholds ascend.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub steps: Option<Arc<[Step]>>,
}

/// The price of a prompt that is longer than a threshold.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Step {
    /// The longest prompt that does not pay it, in tokens.
    pub above: u64,
    /// Dollars a million tokens.
    pub rate: Nanodollars,
}

impl Scale {
    /// One price for all sizes.
    pub fn flat(rate: Nanodollars) -> Self {
        Self {
            base: rate,
            steps: None,
        }
    }

    /// The price at this size of the prompt.
    pub fn at(&self, prompt: u64) -> Nanodollars {
        self.reached(prompt)
            .last()
            .map_or(self.base, |step| step.rate)
    }

    /// The dearest price of any prompt up to this size.
    pub fn dearest(&self, prompt: u64) -> Nanodollars {
        let steps = self.reached(prompt).map(|step| step.rate);
        steps.fold(self.base, Nanodollars::max)
    }

    fn reached(&self, prompt: u64) -> impl Iterator<Item = &Step> {
        let steps = self.steps.as_deref().unwrap_or_default();
        steps.iter().take_while(move |step| prompt > step.above)
    }
}

/// The prices of one model at one time.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Rates {
    /// For [`Tokens::input`].
    pub input: Scale,
    /// For [`Tokens::cached_input`].
    pub cached_input: Scale,
    /// For [`Tokens::cache_write_5m`].
    pub cache_write_5m: Scale,
    /// For [`Tokens::cache_write_1h`].
    pub cache_write_1h: Scale,
    /// For [`Tokens::output`], less its reasoning.
    pub output: Scale,
    /// For [`Tokens::reasoning`].
    pub reasoning: Scale,
    /// Dollars a million calls, on top of their tokens.
    pub calls: Nanodollars,
}

impl Rates {
    /// Two prices, as a person sets them. Cached input pays as fresh, which nobody undercharges.
    pub fn plain(input: Nanodollars, output: Nanodollars) -> Self {
        let (input, output) = (Scale::flat(input), Scale::flat(output));
        Self {
            cached_input: input.clone(),
            cache_write_5m: input.clone(),
            cache_write_1h: input.clone(),
            input,
            reasoning: output.clone(),
            output,
            calls: Nanodollars::ZERO,
        }
    }

    /// What a call with these tokens costs: exact until its end, where it is rounded once, half
    /// to even.
    pub fn cost(&self, tokens: &Tokens) -> Nanodollars {
        let prompt = tokens.prompt();
        let reasoning = tokens.reasoning.min(tokens.output);
        let millionths: u128 = [
            (self.input.at(prompt), tokens.input),
            (self.cached_input.at(prompt), tokens.cached_input),
            (self.cache_write_5m.at(prompt), tokens.cache_write_5m),
            (self.cache_write_1h.at(prompt), tokens.cache_write_1h),
            (self.output.at(prompt), tokens.output - reasoning),
            (self.reasoning.at(prompt), reasoning),
            (self.calls, 1),
        ]
        .into_iter()
        .map(|(rate, count)| u128::from(rate.0.max(0).unsigned_abs()) * u128::from(count))
        .fold(0, u128::saturating_add);
        let billionths = divide_half_even(millionths, PER);
        Nanodollars(i64::try_from(billionths).unwrap_or(i64::MAX))
    }
}

#[cfg(test)]
mod tests {
    use num_bigint::BigInt;
    use num_rational::BigRational;
    use proptest::prelude::*;

    use super::*;
    use crate::policy::money::tests::half_even;

    fn dollars(text: &str) -> Scale {
        Scale::flat(Nanodollars::from_decimal(text).expect("a price"))
    }

    #[test]
    fn each_class_has_its_own_price() {
        let anthropic = Rates {
            input: dollars("3"),
            cached_input: dollars("0.3"),
            cache_write_5m: dollars("3.75"),
            cache_write_1h: dollars("6"),
            output: dollars("15"),
            reasoning: dollars("15"),
            calls: Nanodollars::ZERO,
        };
        let tokens = Tokens {
            input: 50,
            cached_input: 100_000,
            cache_write_5m: 2_000,
            output: 500,
            ..Tokens::default()
        };
        assert_eq!(anthropic.cost(&tokens).to_string(), "$0.04515");
        let openai = Rates {
            input: dollars("2.5"),
            cached_input: dollars("1.25"),
            output: dollars("10"),
            reasoning: dollars("10"),
            ..Rates::default()
        };
        assert_eq!(
            openai
                .cost(&Tokens {
                    cache_write_5m: 0,
                    ..tokens
                })
                .to_string(),
            "$0.130125"
        );
        let writes = Tokens {
            cache_write_5m: 1_000,
            cache_write_1h: 4_000,
            ..Tokens::default()
        };
        assert_eq!(anthropic.cost(&writes).to_string(), "$0.02775");
    }

    #[test]
    fn reasoning_is_a_part_of_the_output() {
        let mut rates = Rates::plain(Nanodollars::ZERO, Nanodollars(10_000_000_000));
        let tokens = |output, reasoning| Tokens {
            output,
            reasoning,
            ..Tokens::default()
        };
        assert_eq!(rates.cost(&tokens(266, 261)).to_string(), "$0.00266");
        rates.reasoning = dollars("3");
        assert_eq!(rates.cost(&tokens(266, 261)).to_string(), "$0.000833");
        // A provider that counts more reasoning than output has its output billed.
        assert_eq!(rates.cost(&tokens(5, 9)).to_string(), "$0.000015");
    }

    #[test]
    fn the_whole_prompt_decides_the_tier() {
        let step = Step {
            above: 200_000,
            rate: Nanodollars(6_000_000_000),
        };
        let scale = Scale {
            base: Nanodollars(3_000_000_000),
            steps: Some(Arc::from([step])),
        };
        let rates = Rates {
            input: scale.clone(),
            ..Rates::default()
        };
        let prompt = |input, cached_input| Tokens {
            input,
            cached_input,
            ..Tokens::default()
        };
        assert_eq!(rates.cost(&prompt(200_000, 0)).to_string(), "$0.60");
        assert_eq!(rates.cost(&prompt(200_001, 0)).to_string(), "$1.200006");
        assert_eq!(rates.cost(&prompt(100_000, 100_001)).to_string(), "$0.60");
        assert_eq!(scale.dearest(200_000), Nanodollars(3_000_000_000));
        assert_eq!(scale.dearest(u64::MAX), Nanodollars(6_000_000_000));
    }

    #[test]
    fn no_count_overflows() {
        let rates = Rates::plain(Nanodollars::MAX, Nanodollars::MAX);
        let tokens = Tokens {
            input: u64::MAX,
            cached_input: u64::MAX,
            cache_write_5m: u64::MAX,
            cache_write_1h: u64::MAX,
            output: u64::MAX,
            reasoning: u64::MAX,
        };
        assert_eq!(rates.cost(&tokens), Nanodollars::MAX);
    }

    fn scale() -> impl Strategy<Value = Scale> {
        let rate = (0_i64..10_000_000_000_000).prop_map(Nanodollars);
        let step = (1_u64..400_000, rate.clone());
        (rate, prop::option::of(prop::collection::vec(step, 1..3))).prop_map(|(base, steps)| {
            let steps = steps.map(|mut steps| {
                steps.sort();
                steps.dedup_by_key(|(above, _)| *above);
                steps
                    .into_iter()
                    .map(|(above, rate)| Step { above, rate })
                    .collect()
            });
            Scale { base, steps }
        })
    }

    proptest! {
        #[test]
        fn a_cost_is_the_exact_rational_rounded_once(
            scales in prop::array::uniform6(scale()),
            counts in prop::array::uniform6(0_u64..500_000),
            calls in 0_i64..20_000_000_000_000,
        ) {
            let [input, cached_input, cache_write_5m, cache_write_1h, output, reasoning] = counts;
            let tokens = Tokens {
                input, cached_input, cache_write_5m, cache_write_1h, output, reasoning,
            };
            let [input, cached_input, cache_write_5m, cache_write_1h, output, reasoning] =
                scales.clone();
            let calls = Nanodollars(calls);
            let rates = Rates {
                input, cached_input, cache_write_5m, cache_write_1h, output, reasoning, calls,
            };
            // Dollars, as anybody would reckon them with fractions.
            let whole = |number: u64| BigRational::from_integer(BigInt::from(number));
            let dollar = BigRational::from_integer(BigInt::from(1_000_000_000_u64));
            let million = whole(1_000_000);
            let prompt: u64 = counts[..4].iter().sum();
            let reasoned = counts[5].min(counts[4]);
            let billed = [
                counts[0], counts[1], counts[2], counts[3], counts[4] - reasoned, reasoned,
            ];
            let mut exact = whole(calls.0.unsigned_abs()) / &dollar / &million;
            for (scale, count) in scales.iter().zip(billed) {
                let mut rate = scale.base;
                for step in scale.steps.iter().flat_map(|steps| steps.iter()) {
                    if prompt > step.above {
                        rate = step.rate;
                    }
                }
                exact += whole(rate.0.unsigned_abs()) / &dollar / &million * whole(count);
            }
            let expected = half_even(&(exact * &dollar));
            prop_assert_eq!(BigInt::from(rates.cost(&tokens).0), expected);
        }
    }
}
