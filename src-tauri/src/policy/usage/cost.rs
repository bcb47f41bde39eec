//! Reads a provider's own cost, in nano-dollars, from the digits it is written with.

/// One dollar.
const NANOS_IN_DOLLAR: u32 = 9;
/// More digits than any amount that fits.
const DIGITS: i64 = 40;

/// Nano-dollars of an amount in dollars, written as a JSON number: `0.00014`, `1.4e-05`.
///
/// Half a nano-dollar and more is rounded up. `None` for anything but a number that is not
/// negative, and for amounts that 64 bits cannot hold (nine billion dollars).
pub fn nanos_of_dollars(text: &str) -> Option<i64> {
    let (mantissa, exponent) = match text.split_once(['e', 'E']) {
        Some((mantissa, exponent)) => (mantissa, exponent.parse::<i64>().ok()?),
        None => (text, 0),
    };
    let (whole, fraction) = mantissa.split_once('.').unwrap_or((mantissa, ""));
    if whole.is_empty() {
        return None;
    }
    let digits: Vec<u8> = whole
        .bytes()
        .chain(fraction.bytes())
        .skip_while(|byte| *byte == b'0')
        .map(|byte| byte.is_ascii_digit().then(|| byte - b'0'))
        .collect::<Option<_>>()?;
    // So many digits stand before the point once the amount is in nano-dollars.
    let leading = i64::try_from(digits.len()).ok()?;
    let fraction = i64::try_from(fraction.len()).ok()?;
    let whole = leading
        .checked_sub(fraction)?
        .checked_add(exponent)?
        .checked_add(NANOS_IN_DOLLAR.into())?;
    if digits.is_empty() || whole < 0 {
        return Some(0);
    }
    if whole > DIGITS {
        return None;
    }
    let whole = usize::try_from(whole).ok()?;
    let padded = digits.iter().copied().chain(std::iter::repeat(0));
    let nanos = padded.take(whole).try_fold(0_i64, |nanos, digit| {
        nanos.checked_mul(10)?.checked_add(digit.into())
    })?;
    let rounds_up = digits.get(whole).is_some_and(|digit| *digit >= 5);
    nanos.checked_add(rounds_up.into())
}

/// Nano-dollars of xAI's ticks, ten of which are one.
/// Source: xAI's *Cost tracking*: a dollar is 10,000,000,000 ticks.
pub fn nanos_of_ticks(ticks: u64) -> Option<i64> {
    let nanos = ticks / 10 + u64::from(ticks % 10 >= 5);
    i64::try_from(nanos).ok()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn dollars_in_every_spelling() {
        for (text, nanos) in [
            ("0", Some(0)),
            ("0.0", Some(0)),
            ("0e9", Some(0)),
            ("1", Some(1_000_000_000)),
            ("0.95", Some(950_000_000)),
            ("0.00014", Some(140_000)),
            ("1.4e-05", Some(14_000)),
            ("1.4E+1", Some(14_000_000_000)),
            ("12e-10", Some(1)),
            ("0.0000000005", Some(1)),
            ("0.00000000049999", Some(0)),
            ("5e-10", Some(1)),
            ("5e-11", Some(0)),
            ("0.00034500049", Some(345_000)),
            ("0.0003450005", Some(345_001)),
            // What a float makes of a sum: 0.1 + 0.2.
            ("0.30000000000000004", Some(300_000_000)),
            ("9223372036.854775807", Some(i64::MAX)),
            ("9223372036.8547758075", None),
            ("9223372037", None),
            ("1e999999999999", None),
            ("1e-999999999999", Some(0)),
            ("1e99999999999999999999", None),
            ("-1", None),
            ("", None),
            (".5", None),
            ("1.x", None),
            ("NaN", None),
        ] {
            assert_eq!(nanos_of_dollars(text), nanos, "{text:?}");
        }
    }

    #[test]
    fn ticks() {
        for (ticks, nanos) in [
            (0, Some(0)),
            (37_756_000, Some(3_775_600)),
            (4, Some(0)),
            (5, Some(1)),
            (u64::MAX, Some(1_844_674_407_370_955_162)),
        ] {
            assert_eq!(nanos_of_ticks(ticks), nanos, "{ticks}");
        }
    }

    proptest! {
        #[test]
        fn a_decimal_point_or_an_exponent_is_the_same(nanos in 0..i64::MAX) {
            let (dollars, rest) = (nanos / 1_000_000_000, nanos % 1_000_000_000);
            prop_assert_eq!(nanos_of_dollars(&format!("{dollars}.{rest:09}")), Some(nanos));
            prop_assert_eq!(nanos_of_dollars(&format!("{nanos}e-9")), Some(nanos));
        }
    }
}
