//! Counts latencies in buckets that grow with them, so that any number of histograms merge into
//! one and still tell a percentile to within 3 %.
//!
//! The buckets are log-linear, as HdrHistogram's are: sixteen of equal width in each power of two
//! of microseconds, single microseconds below sixteen. Every histogram has the same buckets, so
//! merging adds counts and loses nothing.

use std::time::Duration;

/// Buckets in each power of two, as a power of two. Four bits bound the error to 1 in 33.
const BITS: u32 = 4;
const BUCKETS_AN_OCTAVE: usize = 1 << BITS;

/// What is longer counts as this long: 2^40 µs are twelve days.
const LONGEST: u64 = (1 << 40) - 1;

const BUCKETS: usize = bucket_of(LONGEST) + 1;

/// How long calls took, by count.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LatencyHistogram {
    /// By bucket, as far as the longest that was counted: never ends in a zero.
    counts: Vec<u64>,
}

/// Why bytes are no histogram.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    /// They end within a number.
    #[error("a latency histogram is cut short")]
    Truncated,
    /// A number, bucket or count that no histogram has.
    #[error("a latency histogram holds an impossible number")]
    OutOfRange,
}

impl LatencyHistogram {
    /// Counts one latency, to the microsecond.
    pub fn record(&mut self, latency: Duration) {
        let micros = u64::try_from(latency.as_micros()).unwrap_or(LONGEST);
        self.add(bucket_of(micros.min(LONGEST)), 1);
    }

    /// Counts all that `other` has counted.
    pub fn merge(&mut self, other: &Self) {
        for (bucket, &count) in other.counts.iter().enumerate().rev() {
            self.add(bucket, count);
        }
    }

    /// [`Self::merge`] with a histogram as [`Self::encode`] wrote it. On an error some of it may
    /// have been counted.
    ///
    /// # Errors
    /// [`DecodeError`] if the bytes are no histogram.
    pub fn merge_encoded(&mut self, mut bytes: &[u8]) -> Result<(), DecodeError> {
        let mut next = 0_usize;
        while !bytes.is_empty() {
            let gap = usize::try_from(take_varint(&mut bytes)?);
            let count = take_varint(&mut bytes)?;
            let bucket = gap
                .ok()
                .and_then(|gap| next.checked_add(gap))
                .filter(|bucket| *bucket < BUCKETS && count > 0)
                .ok_or(DecodeError::OutOfRange)?;
            self.add(bucket, count);
            next = bucket + 1;
        }
        Ok(())
    }

    /// How many were counted.
    pub fn count(&self) -> u64 {
        self.counts
            .iter()
            .fold(0, |sum, count| sum.saturating_add(*count))
    }

    /// The latency that `share` (0 to 1) of those counted did not exceed, by nearest rank and to
    /// within 3 %; `None` if nothing was counted.
    pub fn percentile(&self, share: f64) -> Option<Duration> {
        let total = self.count();
        if total == 0 {
            return None;
        }
        // Exact far beyond any number of calls.
        let rank = ((share * total as f64).ceil() as u64).clamp(1, total);
        let mut seen = 0_u64;
        let bucket = self.counts.iter().position(|count| {
            seen = seen.saturating_add(*count);
            seen >= rank
        })?;
        Some(Duration::from_micros(middle(bucket)))
    }

    /// How many took longer than `limit`. Those within 6 % of it, that is in its own bucket, count
    /// as longer: whoever chooses a timeout by this should hear of too many cuts, not too few.
    pub fn count_over(&self, limit: Duration) -> u64 {
        let micros = u64::try_from(limit.as_micros()).unwrap_or(u64::MAX);
        if micros > LONGEST {
            return 0;
        }
        self.counts
            .iter()
            .skip(bucket_of(micros))
            .fold(0, |sum, count| sum.saturating_add(*count))
    }

    /// As bytes: for each bucket that counts anything the number of buckets left out before it and
    /// its count, both as LEB128. Two or three bytes a bucket; none for an empty histogram.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        let mut gap = 0;
        for &count in &self.counts {
            if count == 0 {
                gap += 1;
            } else {
                put_varint(&mut bytes, gap);
                put_varint(&mut bytes, count);
                gap = 0;
            }
        }
        bytes
    }

    fn add(&mut self, bucket: usize, count: u64) {
        if count == 0 {
            return;
        }
        if bucket >= self.counts.len() {
            self.counts.resize(bucket + 1, 0);
        }
        self.counts[bucket] = self.counts[bucket].saturating_add(count);
    }
}

/// The bucket of a number of microseconds.
const fn bucket_of(micros: u64) -> usize {
    let octave = micros.checked_ilog2();
    match octave {
        Some(octave) if octave >= BITS => {
            let shift = octave - BITS;
            let within = (micros >> shift) as usize & (BUCKETS_AN_OCTAVE - 1);
            (shift as usize + 1) * BUCKETS_AN_OCTAVE + within
        }
        // Below sixteen, each is its own bucket.
        _ => micros as usize,
    }
}

/// The first microsecond of a bucket.
const fn lower_bound(bucket: usize) -> u64 {
    let octave = bucket / BUCKETS_AN_OCTAVE;
    let within = (bucket % BUCKETS_AN_OCTAVE) as u64;
    match octave {
        0 => within,
        octave => (BUCKETS_AN_OCTAVE as u64 + within) << (octave - 1),
    }
}

/// What stands for a bucket: the harmonic mean of its ends, which is off by the same share (at most
/// 1 in 33) for either.
fn middle(bucket: usize) -> u64 {
    let (low, high) = (lower_bound(bucket), lower_bound(bucket + 1) - 1);
    // Both are below 2^40: the product needs more than 64 bits.
    let mean = 2 * u128::from(low) * u128::from(high) / u128::from((low + high).max(1));
    u64::try_from(mean).unwrap_or(high)
}

fn put_varint(bytes: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        bytes.push(0x80 | (number & 0x7f) as u8);
        number >>= 7;
    }
    bytes.push(number as u8);
}

fn take_varint(bytes: &mut &[u8]) -> Result<u64, DecodeError> {
    let mut number = 0_u64;
    for shift in (0..u64::BITS).step_by(7) {
        let (&byte, rest) = bytes.split_first().ok_or(DecodeError::Truncated)?;
        *bytes = rest;
        let part = u64::from(byte & 0x7f);
        if part << shift >> shift != part {
            break;
        }
        number |= part << shift;
        if byte < 0x80 {
            return Ok(number);
        }
    }
    Err(DecodeError::OutOfRange)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn of(micros: &[u64]) -> LatencyHistogram {
        let mut histogram = LatencyHistogram::default();
        for micros in micros {
            histogram.record(Duration::from_micros(*micros));
        }
        histogram
    }

    /// Latencies as they come: as likely among microseconds as among hours.
    fn latency() -> impl Strategy<Value = u64> {
        (0_u32..44).prop_flat_map(|bits| 0..(1_u64 << bits).max(2))
    }

    #[test]
    fn an_empty_one_has_no_percentile_and_no_bytes() {
        let empty = LatencyHistogram::default();
        assert_eq!(empty.percentile(0.5), None);
        assert_eq!(empty.count_over(Duration::ZERO), 0);
        assert!(empty.encode().is_empty());
    }

    #[test]
    fn small_ones_are_exact() {
        let histogram = of(&[0, 1, 2, 15]);
        let at = |share| histogram.percentile(share).map(|span| span.as_micros());
        assert_eq!(at(0.0), Some(0));
        assert_eq!(at(0.5), Some(1));
        assert_eq!(at(0.75), Some(2));
        assert_eq!(at(1.0), Some(15));
    }

    #[test]
    fn a_quarter_hours_worth_is_compact() {
        // A hundred calls between 200 ms and 20 s.
        let histogram = of(&(0..100).map(|i| 200_000 + i * 198_000).collect::<Vec<_>>());
        assert!(
            histogram.encode().len() < 150,
            "{}",
            histogram.encode().len()
        );
    }

    #[test]
    fn what_is_no_histogram_is_refused() {
        let merge = |bytes: &[u8]| LatencyHistogram::default().merge_encoded(bytes);
        assert_eq!(merge(&[5]), Err(DecodeError::Truncated), "no count");
        assert_eq!(merge(&[0x80]), Err(DecodeError::Truncated));
        assert_eq!(merge(&[5, 0]), Err(DecodeError::OutOfRange), "counts none");
        assert_eq!(merge(&[0xff, 0x7f, 1]), Err(DecodeError::OutOfRange));
        assert_eq!(merge(&[0xff; 11]), Err(DecodeError::OutOfRange));
        let too_large = [
            0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x80, 0x02, 1,
        ];
        assert_eq!(merge(&too_large), Err(DecodeError::OutOfRange), "2^64");
    }

    #[test]
    fn buckets_follow_each_other_without_a_gap() {
        for bucket in 0..BUCKETS {
            let (low, next) = (lower_bound(bucket), lower_bound(bucket + 1));
            assert!(low < next);
            assert_eq!(bucket_of(low), bucket);
            assert_eq!(bucket_of(next - 1), bucket);
        }
        assert_eq!(lower_bound(BUCKETS), LONGEST + 1);
    }

    proptest! {
        #[test]
        fn percentiles_are_true_to_within_a_thirty_third(
            mut micros in prop::collection::vec(latency(), 1..300),
            share in 0.0..=1.0_f64,
        ) {
            let histogram = of(&micros);
            micros.sort_unstable();
            let rank = ((share * micros.len() as f64).ceil() as usize).clamp(1, micros.len());
            let exact = u128::from(micros[rank - 1].min(LONGEST));
            let told = histogram.percentile(share).expect("some").as_micros();
            prop_assert!(told.abs_diff(exact) * 33 <= exact + 33, "{told} for {exact}");
        }

        #[test]
        fn merging_is_counting_together(
            parts in prop::collection::vec(prop::collection::vec(latency(), 0..50), 0..6),
        ) {
            let mut merged = LatencyHistogram::default();
            let mut from_bytes = LatencyHistogram::default();
            for part in parts.iter().rev() {
                merged.merge(&of(part));
                prop_assert_eq!(from_bytes.merge_encoded(&of(part).encode()), Ok(()));
            }
            let together = of(&parts.concat());
            prop_assert_eq!(&merged, &together);
            prop_assert_eq!(&from_bytes, &together);
            prop_assert_eq!(together.count(), parts.concat().len() as u64);
        }

        #[test]
        fn over_a_limit_errs_only_within_its_bucket(
            micros in prop::collection::vec(latency(), 0..100),
            limit in latency(),
        ) {
            let told = of(&micros).count_over(Duration::from_micros(limit));
            let from = |least: u64| micros.iter().filter(|micros| **micros >= least).count() as u64;
            let over = if limit > LONGEST { 0 } else { from(limit + 1) };
            prop_assert!(told >= over);
            prop_assert!(told <= from(limit - limit / 16));
        }

        #[test]
        fn any_bytes_are_read_or_refused(bytes in prop::collection::vec(any::<u8>(), 0..40)) {
            let mut histogram = LatencyHistogram::default();
            if histogram.merge_encoded(&bytes).is_ok() {
                let mut again = LatencyHistogram::default();
                prop_assert_eq!(again.merge_encoded(&histogram.encode()), Ok(()));
                prop_assert_eq!(again, histogram);
            }
        }
    }
}
