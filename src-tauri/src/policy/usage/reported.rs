//! Counts as the provider states them, and what they come to.

use super::{Basis, Flavour, Usage, plus};

/// Counts of one kind of work, as they stand in the answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    pub prompt: Option<u64>,
    pub completion: Option<u64>,
    /// Read from the cache: in `prompt` at some providers, on top of it at others.
    pub cached: Option<u64>,
    /// All that was written to the cache, for however long.
    pub cache_write: Option<u64>,
    pub cache_write_5m: Option<u64>,
    pub cache_write_1h: Option<u64>,
}

/// What an answer has said of its usage so far, in the provider's own terms.
///
/// A stream may say it once, bit by bit, or over and over as it grows. All counts are sums up to
/// where they stand, so the last one holds; one that is absent, null or zero takes nothing back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reported {
    pub counts: Counts,
    /// Anthropic's automatic compaction: work of its own, which `counts` leaves out.
    pub compaction: Counts,
    pub reasoning: Option<u64>,
    pub total: Option<u64>,
    pub prompt_audio: Option<u64>,
    pub completion_audio: Option<u64>,
    pub cost_nanos: Option<i64>,
    /// Cached input and cache writes come on top of `prompt`, as Anthropic has it, and never are
    /// a part of it.
    pub cache_on_top: bool,
}

/// The later count holds, unless it says nothing.
fn replace<T: Copy + PartialEq + Default>(count: &mut Option<T>, later: Option<T>) {
    if later.is_some_and(|later| later != T::default()) || count.is_none() {
        *count = later;
    }
}

impl Counts {
    fn update(&mut self, later: Self) {
        let Self {
            prompt,
            completion,
            cached,
            cache_write,
            cache_write_5m,
            cache_write_1h,
        } = later;
        replace(&mut self.prompt, prompt);
        replace(&mut self.completion, completion);
        replace(&mut self.cached, cached);
        replace(&mut self.cache_write, cache_write);
        replace(&mut self.cache_write_5m, cache_write_5m);
        replace(&mut self.cache_write_1h, cache_write_1h);
    }

    /// Work done beside this.
    pub fn add(&mut self, other: Self) {
        self.prompt = plus(self.prompt, other.prompt);
        self.completion = plus(self.completion, other.completion);
        self.cached = plus(self.cached, other.cached);
        self.cache_write = plus(self.cache_write, other.cache_write);
        self.cache_write_5m = plus(self.cache_write_5m, other.cache_write_5m);
        self.cache_write_1h = plus(self.cache_write_1h, other.cache_write_1h);
    }

    /// The writes by their lifetime, and whether all of them have one. Those without are taken
    /// for five minutes, which is the default and the cheaper.
    fn writes(&self) -> (Option<u64>, Option<u64>, bool) {
        let known = plus(self.cache_write_5m, self.cache_write_1h).unwrap_or(0);
        match self.cache_write {
            Some(all) if all > known => (
                plus(self.cache_write_5m, Some(all - known)),
                self.cache_write_1h,
                false,
            ),
            // Said to be none.
            Some(0) => (self.cache_write_5m.or(Some(0)), self.cache_write_1h, true),
            _ => (self.cache_write_5m, self.cache_write_1h, true),
        }
    }
}

impl Reported {
    /// Takes what the answer says further on.
    pub fn update(&mut self, later: Self) {
        let Self {
            counts,
            compaction,
            reasoning,
            total,
            prompt_audio,
            completion_audio,
            cost_nanos,
            cache_on_top,
        } = later;
        self.counts.update(counts);
        self.compaction.update(compaction);
        replace(&mut self.reasoning, reasoning);
        replace(&mut self.total, total);
        replace(&mut self.prompt_audio, prompt_audio);
        replace(&mut self.completion_audio, completion_audio);
        replace(&mut self.cost_nanos, cost_nanos);
        self.cache_on_top |= cache_on_top;
    }

    /// Nothing was said.
    pub fn is_empty(&self) -> bool {
        *self
            == Self {
                cache_on_top: self.cache_on_top,
                ..Self::default()
            }
    }

    /// What it comes to; `None` if nothing was said.
    ///
    /// Providers on OpenAI's routes differ in what `prompt_tokens` and `completion_tokens` take
    /// in: at OpenAI cached input and reasoning are parts of them, at xAI reasoning comes on top,
    /// at some gateways the cache too. The first reading whose sum is `total_tokens` holds,
    /// OpenAI's own first. If none is, the counts are [`Basis::Doubtful`] and what cannot be
    /// placed counts as output, the dearer side.
    pub fn usage(&self, flavour: Flavour) -> Option<Usage> {
        if self.is_empty() {
            return None;
        }
        let (write_5m, write_1h, has_lifetimes) = self.counts.writes();
        let usage = Usage {
            cached_input: self.counts.cached,
            cache_write_5m: write_5m,
            cache_write_1h: write_1h,
            reasoning: self.reasoning,
            input_audio: self.prompt_audio,
            output_audio: self.completion_audio,
            cost_nanos: self.cost_nanos,
            basis: if has_lifetimes {
                Basis::Reported
            } else {
                Basis::Doubtful
            },
            ..Usage::default()
        };
        Some(if self.cache_on_top {
            self.with_cache_on_top(usage)
        } else {
            self.with_total(usage, flavour)
        })
    }

    fn with_cache_on_top(&self, usage: Usage) -> Usage {
        let (write_5m, write_1h, has_lifetimes) = self.compaction.writes();
        Usage {
            input: plus(self.counts.prompt, self.compaction.prompt),
            cached_input: plus(usage.cached_input, self.compaction.cached),
            cache_write_5m: plus(usage.cache_write_5m, write_5m),
            cache_write_1h: plus(usage.cache_write_1h, write_1h),
            // Without the answer's own count there is none to add to.
            output: self
                .counts
                .completion
                .and_then(|output| plus(Some(output), self.compaction.completion)),
            basis: if has_lifetimes {
                usage.basis
            } else {
                Basis::Doubtful
            },
            ..usage
        }
    }

    fn with_total(&self, usage: Usage, flavour: Flavour) -> Usage {
        let cache = [
            usage.cached_input,
            usage.cache_write_5m,
            usage.cache_write_1h,
        ];
        let cache = cache.into_iter().fold(None, plus).unwrap_or(0);
        let total = self.total;
        let (prompt, completion) = match (self.counts.prompt, self.counts.completion, total) {
            (Some(prompt), Some(completion), _) => (prompt, completion),
            // One of the two follows from the total.
            (Some(prompt), None, Some(total)) if total >= prompt => (prompt, total - prompt),
            (None, Some(completion), Some(total)) if total >= completion => {
                (total - completion, completion)
            }
            (prompt, output, _) => {
                let input = prompt.map(|prompt| prompt.checked_sub(cache).unwrap_or(prompt));
                return Usage {
                    input,
                    output,
                    ..usage
                };
            }
        };
        let stated = Stated {
            prompt,
            completion,
            cache,
            reasoning: self.reasoning.unwrap_or(0),
        };
        let Some(total) = total else {
            let apart = flavour == Flavour::Xai || stated.reasoning > completion;
            return stated.apply(usage, cache > prompt, apart);
        };
        if let Some((on_top, apart)) = stated.reading_of(total) {
            return stated.apply(usage, on_top, apart);
        }
        let read = stated.apply(usage, cache > prompt, stated.reasoning > completion);
        let rest = total.saturating_sub(plus(read.whole_input(), read.output).unwrap_or(0));
        // Gemini's thinking is in the total and nowhere else.
        let is_thinking = stated.reasoning == 0 && rest > 0;
        Usage {
            output: plus(read.output, Some(rest)),
            reasoning: if is_thinking {
                Some(rest)
            } else {
                self.reasoning
            },
            basis: if is_thinking && flavour == Flavour::Gemini {
                read.basis
            } else {
                Basis::Doubtful
            },
            ..read
        }
    }
}

/// Counts that may lie within or beside each other.
#[derive(Clone, Copy, Debug)]
struct Stated {
    prompt: u64,
    completion: u64,
    cache: u64,
    reasoning: u64,
}

impl Stated {
    /// Whether the cache comes on top of the prompt, and reasoning of the completion, by what
    /// they add up to; `None` if by nothing.
    fn reading_of(&self, total: u64) -> Option<(bool, bool)> {
        let readings = [(false, false), (false, true), (true, false), (true, true)];
        readings.into_iter().find(|&(on_top, apart)| {
            // More than the whole is no part of it.
            let is_possible = (on_top || self.cache <= self.prompt)
                && (apart || self.reasoning <= self.completion);
            let on_top = if on_top { self.cache } else { 0 };
            let apart = if apart { self.reasoning } else { 0 };
            let sum = [self.prompt, self.completion, on_top, apart];
            is_possible && total == sum.into_iter().fold(0, u64::saturating_add)
        })
    }

    fn apply(&self, usage: Usage, on_top: bool, apart: bool) -> Usage {
        let input = if on_top {
            self.prompt
        } else {
            self.prompt.saturating_sub(self.cache)
        };
        let apart = if apart { self.reasoning } else { 0 };
        Usage {
            input: Some(input),
            output: Some(self.completion.saturating_add(apart)),
            ..usage
        }
    }
}
