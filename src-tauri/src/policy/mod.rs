//! Decides, without I/O, async or a clock of its own: the time is passed in.

pub mod breaker;
pub mod budget;
pub mod calendar;
pub mod fingerprint;
pub mod latency_histogram;
pub mod money;
pub mod price;
pub mod repeats;
pub mod routing;
pub mod runaway;
pub mod tap;
pub mod usage;
