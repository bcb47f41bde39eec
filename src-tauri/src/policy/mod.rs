//! Decides, without I/O, async or a clock of its own: the time is passed in.

pub mod breaker;
pub mod fingerprint;
pub mod latency_histogram;
pub mod repeats;
pub mod routing;
pub mod tap;
