//! What a call used: tokens by class, from the answer's own words or by an estimate.
//!
//! [`Reported`] holds the counts as the provider states them while the tap reads the answer along;
//! [`Reported::usage`] brings them into one form. [`ask`] and [`filter`] get a usage event out of
//! streams that would come without one, [`estimate`] fills in what no provider said.

pub mod ask;
pub mod cost;
pub mod estimate;
pub mod filter;
mod flavour;
mod reported;
#[cfg(test)]
mod tests;

pub use self::flavour::Flavour;
pub use self::reported::{Counts, Reported};

/// How far a [`Usage`] can be relied on, the best first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Basis {
    /// The provider's counts, and they add up.
    #[default]
    Reported,
    /// The provider's counts, but they do not say all that a price needs: they do not add up to
    /// their own total, or cache writes come without their lifetime.
    Doubtful,
    /// Some of it is an estimate.
    Estimated,
}

/// Tokens of one call, in classes that do not overlap unless it is said. `None` is unknown,
/// never zero.
///
/// A price is applied class by class: `input`, `cached_input`, the two cache writes and `output`
/// add up to all that is billed. Which tier of a long-context price holds is decided by
/// [`Usage::whole_input`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Fresh input: neither read from the provider's cache nor written to it. Where a provider
    /// does not speak of its cache, all of the input.
    pub input: Option<u64>,
    /// Input read from the provider's cache.
    pub cached_input: Option<u64>,
    /// Input written to the cache for five minutes, or for a time that the provider does not say
    /// ([`Basis::Doubtful`] then).
    pub cache_write_5m: Option<u64>,
    /// Input written to the cache for an hour.
    pub cache_write_1h: Option<u64>,
    /// All output that is billed, reasoning included.
    pub output: Option<u64>,
    /// The part of `output` that was reasoning.
    pub reasoning: Option<u64>,
    /// The part of all input that was sound, cached or not.
    pub input_audio: Option<u64>,
    /// The part of `output` that was sound.
    pub output_audio: Option<u64>,
    /// What the provider says the call cost, in nano-dollars; it wins over any price list.
    pub cost_nanos: Option<i64>,
    pub basis: Basis,
}

impl Usage {
    /// All input, cached or not; `None` if no part of it is known.
    pub fn whole_input(&self) -> Option<u64> {
        [
            self.input,
            self.cached_input,
            self.cache_write_5m,
            self.cache_write_1h,
        ]
        .into_iter()
        .fold(None, plus)
    }

    /// Both sides are known: nothing is left to estimate.
    pub fn is_complete(&self) -> bool {
        self.input.is_some() && self.output.is_some()
    }
}

/// A sum in which the unknown counts as nothing, unless nothing else is there.
fn plus(a: Option<u64>, b: Option<u64>) -> Option<u64> {
    match (a, b) {
        (None, one) | (one, None) => one,
        (Some(a), Some(b)) => Some(a.saturating_add(b)),
    }
}
