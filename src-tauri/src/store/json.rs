//! How times, spans and keys stand in the JSON that faces read.
//!
//! Times are RFC 3339 in UTC with microseconds, spans are milliseconds with fractions, keys are
//! lower-case hex. Money is whole nano-dollars, and decimal text in dollars beside that where people
//! read.

use std::time::Duration;

use jiff::Timestamp;
use serde::Serializer;

use super::queries::OPEN;
use crate::clock::WallTime;
use crate::policy::money::Nanodollars;

/// `2026-11-30T14:03:22.123456Z`: always six digits, so that the texts sort as the times do.
pub(crate) fn text_of(time: WallTime) -> String {
    let time = Timestamp::from_microsecond(time.0).unwrap_or(Timestamp::UNIX_EPOCH);
    format!("{time:.6}")
}

/// A span in milliseconds. Whole microseconds divided by a thousand, not seconds times a
/// thousand: that prints 412, never 412.00000000000006.
pub(crate) fn millis_of(span: Duration) -> f64 {
    // Lossless below 285 years.
    #[expect(clippy::cast_precision_loss, reason = "no span comes near 2^53 µs")]
    let micros = span.as_micros() as f64;
    micros / 1000.0
}

/// Nano-dollars as exact decimal text in dollars, with two decimals at least: `0.000012`.
pub(crate) fn dollars_of(nanos: i64) -> String {
    Nanodollars(nanos).to_string().replacen('$', "", 1)
}

/// Bytes as lower-case hex.
pub(crate) fn hex_of(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

// serde's `serialize_with` hands over references.

pub(crate) fn time<S: Serializer>(time: &WallTime, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&text_of(*time))
}

#[expect(clippy::ref_option, reason = "the signature is serde's")]
pub(crate) fn time_if_any<S: Serializer>(
    time: &Option<WallTime>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    match time {
        Some(time) => serializer.serialize_some(&text_of(*time)),
        None => serializer.serialize_none(),
    }
}

#[expect(clippy::ref_option, reason = "the signature is serde's")]
pub(crate) fn millis_if_any<S: Serializer>(
    span: &Option<Duration>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    match span {
        Some(span) => serializer.serialize_some(&millis_of(*span)),
        None => serializer.serialize_none(),
    }
}

#[expect(clippy::ref_option, reason = "the signature is serde's")]
pub(crate) fn hex_if_any<S: Serializer>(
    bytes: &Option<Vec<u8>>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    match bytes {
        Some(bytes) => serializer.serialize_some(&hex_of(bytes)),
        None => serializer.serialize_none(),
    }
}

/// The word for an outcome, `open` where there is none yet.
#[expect(clippy::ref_option, reason = "the signature is serde's")]
pub(crate) fn outcome<S: Serializer>(
    outcome: &Option<String>,
    serializer: S,
) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(outcome.as_deref().unwrap_or(OPEN))
}
