//! Money: whole billionths of a dollar, never a float.

use std::fmt;
use std::iter::Sum;

use serde::{Deserialize, Serialize};

/// Decimals of a dollar that an amount keeps.
const DECIMALS: usize = 9;

/// Billionths in a dollar.
const DOLLAR: u128 = 1_000_000_000;

/// Billionths of a dollar; up to nine billion dollars, on either side of zero.
///
/// A sum that would leave that range stays at its end: a budget that is passed stays passed.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(transparent)]
pub struct Nanodollars(pub i64);

impl Nanodollars {
    /// Nothing.
    pub const ZERO: Self = Self(0);
    /// More than anybody has.
    pub const MAX: Self = Self(i64::MAX);

    /// An amount as a person writes it: `5`, `0.50`; 0 to 1,000,000 dollars with at most nine
    /// decimals and no exponent. `None` for anything else: a tenth decimal is more likely a slip
    /// than an intention, and rounding would hide it.
    pub fn from_decimal(text: &str) -> Option<Self> {
        let number = Number::read(text)?;
        let as_written = !number.negative && !number.scientific;
        if !as_written || number.decimals > DECIMALS {
            return None;
        }
        let amount = number.billionths()?;
        (amount.0 <= 1_000_000_000_000_000).then_some(amount)
    }

    /// An amount as a machine writes it, a JSON number: `0.00014`, `1.4e-4`, `-0.5`. What lies
    /// beyond the ninth decimal is rounded, half to even, since a sum of floats ends in
    /// `…0000000000003`. `None` where it is no number or does not fit.
    pub fn from_json(text: &str) -> Option<Self> {
        Number::read(text)?.billionths()
    }

    /// The share of an amount in millionths, rounded down.
    pub fn millionths(self, share: u32) -> Self {
        let product = i128::from(self.0) * i128::from(share);
        Self::clamped(product.div_euclid(1_000_000))
    }

    /// The sum, or the end of the range.
    #[must_use]
    pub const fn saturating_add(self, other: Self) -> Self {
        Self(self.0.saturating_add(other.0))
    }

    /// The difference, or the end of the range.
    #[must_use]
    pub const fn saturating_sub(self, other: Self) -> Self {
        Self(self.0.saturating_sub(other.0))
    }

    /// The sum; `None` where it does not fit.
    #[must_use]
    pub fn checked_add(self, other: Self) -> Option<Self> {
        self.0.checked_add(other.0).map(Self)
    }

    /// The nearest amount there is.
    pub(crate) fn clamped(billionths: i128) -> Self {
        let limit = if billionths < 0 { i64::MIN } else { i64::MAX };
        Self(i64::try_from(billionths).unwrap_or(limit))
    }
}

impl Sum for Nanodollars {
    fn sum<I: Iterator<Item = Self>>(amounts: I) -> Self {
        amounts.fold(Self::ZERO, Self::saturating_add)
    }
}

/// `$1.84`, `$0.000012`: exact, with no fewer than two decimals. With a precision (`{:.2}`) it
/// is rounded to that many, half to even.
impl fmt::Display for Nanodollars {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let decimals = f.precision().map_or(DECIMALS, |asked| asked.min(DECIMALS));
        let unit = 10_u128.pow(cut_off(decimals));
        let rounded = divide_half_even(u128::from(self.0.unsigned_abs()), unit) * unit;
        let fraction = format!("{:09}", rounded % DOLLAR);
        let shown = match f.precision() {
            Some(_) => &fraction[..decimals],
            None => {
                let used = fraction.trim_end_matches('0').len();
                &fraction[..used.max(2)]
            }
        };
        let sign = if self.0 < 0 && rounded > 0 { "-" } else { "" };
        let dot = if shown.is_empty() { "" } else { "." };
        write!(f, "{sign}${}{dot}{shown}", rounded / DOLLAR)
    }
}

/// The power of ten that separates this many decimals from nine.
fn cut_off(decimals: usize) -> u32 {
    u32::try_from(DECIMALS - decimals).unwrap_or_default()
}

/// `dividend / divisor` to the nearest whole number, half to even. The divisor is not zero.
pub(crate) fn divide_half_even(dividend: u128, divisor: u128) -> u128 {
    let (whole, rest) = (dividend / divisor, dividend % divisor);
    // Compared with what is missing to a whole, since twice the rest may not fit.
    match rest.cmp(&(divisor - rest)) {
        std::cmp::Ordering::Less => whole,
        std::cmp::Ordering::Equal => whole + whole % 2,
        std::cmp::Ordering::Greater => whole + 1,
    }
}

/// A decimal number as it was written.
struct Number {
    negative: bool,
    scientific: bool,
    /// All digits, without the point.
    digits: u128,
    /// How many of them stand behind the point.
    decimals: usize,
    exponent: i32,
}

impl Number {
    fn read(text: &str) -> Option<Self> {
        let (unsigned, negative) = match text.strip_prefix('-') {
            Some(rest) => (rest, true),
            None => (text, false),
        };
        let (mantissa, exponent) = match unsigned.split_once(['e', 'E']) {
            Some((mantissa, exponent)) => (mantissa, Some(exponent.parse().ok()?)),
            None => (unsigned, None),
        };
        let (whole, fraction) = mantissa.split_once('.').unwrap_or((mantissa, ""));
        let is_digits = |part: &str| part.bytes().all(|byte| byte.is_ascii_digit());
        if whole.is_empty() || !is_digits(whole) || !is_digits(fraction) {
            return None;
        }
        let mut digits: u128 = 0;
        for digit in whole.bytes().chain(fraction.bytes()) {
            digits = digits
                .checked_mul(10)?
                .checked_add(u128::from(digit - b'0'))?;
        }
        Some(Self {
            negative,
            scientific: exponent.is_some(),
            digits,
            decimals: fraction.len(),
            exponent: exponent.unwrap_or_default(),
        })
    }

    fn billionths(&self) -> Option<Nanodollars> {
        // `digits` has at most 39 places, so a longer shift leaves nothing or does not fit.
        let shift = i64::from(self.exponent) + 9 - i64::try_from(self.decimals).ok()?;
        let power = |by: u64| {
            u32::try_from(by)
                .ok()
                .and_then(|by| 10_u128.checked_pow(by))
        };
        let amount = if self.digits == 0 {
            0
        } else if shift >= 0 {
            self.digits.checked_mul(power(shift.unsigned_abs())?)?
        } else {
            power(shift.unsigned_abs()).map_or(0, |power| divide_half_even(self.digits, power))
        };
        let amount = i64::try_from(amount).ok()?;
        Some(Nanodollars(if self.negative { -amount } else { amount }))
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use num_bigint::BigInt;
    use num_rational::BigRational;
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_person_writes_at_most_nine_decimals() {
        let reads = [
            ("0", 0),
            ("0.1", 100_000_000),
            ("5", 5_000_000_000),
            ("5.", 5_000_000_000),
            ("0.000000001", 1),
            ("1000000", 1_000_000_000_000_000),
        ];
        for (text, amount) in reads {
            assert_eq!(
                Nanodollars::from_decimal(text),
                Some(Nanodollars(amount)),
                "{text}"
            );
        }
        let refused = [
            "",
            ".",
            ".5",
            "-1",
            "-0",
            "+1",
            "1e3",
            "0.0000000001",
            "1000000.000000001",
            "inf",
            "nan",
            "1_0",
            "0x5",
            "1.2.3",
            " 1",
            "1 ",
            "99999999999999999999999999999999999999999",
        ];
        for text in refused {
            assert_eq!(Nanodollars::from_decimal(text), None, "{text}");
        }
    }

    #[test]
    fn a_machine_writes_what_a_float_prints() {
        let reads = [
            ("0.00014", 140_000),
            ("1.4e-4", 140_000),
            ("1.4E-04", 140_000),
            ("-0.5", -500_000_000),
            ("0.41250000000000003", 412_500_000),
            ("0.0000000005", 0),
            ("0.0000000015", 2),
            ("0.0000000025", 2),
            ("0.00000000250000001", 3),
            ("1e-300", 0),
            ("0e999999999", 0),
            ("9223372036", 9_223_372_036_000_000_000),
        ];
        for (text, amount) in reads {
            assert_eq!(
                Nanodollars::from_json(text),
                Some(Nanodollars(amount)),
                "{text}"
            );
        }
        for text in [
            "",
            "null",
            "\"1\"",
            "1e300",
            "1e99999999999",
            "9223372037",
            "--1",
            "1e",
        ] {
            assert_eq!(Nanodollars::from_json(text), None, "{text}");
        }
    }

    #[test]
    fn it_is_shown_to_the_last_billionth_or_as_asked() {
        let shown = |amount| Nanodollars(amount).to_string();
        assert_eq!(shown(0), "$0.00");
        assert_eq!(shown(1_840_000_000), "$1.84");
        assert_eq!(shown(12_000), "$0.000012");
        assert_eq!(shown(5_000_000_000), "$5.00");
        assert_eq!(shown(-1), "-$0.000000001");
        assert_eq!(shown(i64::MIN), "-$9223372036.854775808");
        let cents = |amount| format!("{:.2}", Nanodollars(amount));
        assert_eq!(cents(1_845_000_000), "$1.84");
        assert_eq!(cents(1_855_000_000), "$1.86");
        assert_eq!(cents(1_999_999_999), "$2.00");
        assert_eq!(cents(-1), "$0.00");
        assert_eq!(format!("{:.0}", Nanodollars(2_500_000_000)), "$2");
        assert_eq!(format!("{:.20}", Nanodollars(1)), "$0.000000001");
    }

    #[test]
    fn sums_stay_in_their_range() {
        assert_eq!(
            Nanodollars::MAX.saturating_add(Nanodollars(1)),
            Nanodollars::MAX
        );
        assert_eq!(Nanodollars::MAX.checked_add(Nanodollars(1)), None);
        let sum: Nanodollars = [Nanodollars::MAX, Nanodollars(5)].into_iter().sum();
        assert_eq!(sum, Nanodollars::MAX);
        assert_eq!(
            Nanodollars(5_000_000_000).millionths(800_000),
            Nanodollars(4_000_000_000)
        );
        assert_eq!(Nanodollars::MAX.millionths(1_000_000), Nanodollars::MAX);
        assert_eq!(Nanodollars::MAX.millionths(u32::MAX), Nanodollars::MAX);
    }

    proptest! {
        #[test]
        fn a_decimal_is_read_as_the_exact_rational_rounds(
            negative: bool,
            digits in 0_u64..1_000_000_000_000,
            decimals in 0_usize..20,
            exponent in -6_i32..6,
        ) {
            let padded = format!("{digits:0>width$}", width = decimals + 1);
            let (whole, fraction) = padded.split_at(padded.len() - decimals);
            let sign = if negative { "-" } else { "" };
            let text = match (fraction.is_empty(), exponent) {
                (true, 0) => format!("{sign}{whole}"),
                (false, 0) => format!("{sign}{whole}.{fraction}"),
                (true, _) => format!("{sign}{whole}e{exponent}"),
                (false, _) => format!("{sign}{whole}.{fraction}E{exponent}"),
            };
            let ten = BigRational::from_integer(BigInt::from(10));
            let power = 9 + exponent - i32::try_from(decimals).unwrap();
            let exact = BigRational::from_integer(BigInt::from(digits)) * ten.pow(power);
            let nearest = half_even(&exact);
            let signed = if negative { -nearest } else { nearest };
            let expected = i64::try_from(signed).ok().map(Nanodollars);
            prop_assert_eq!(Nanodollars::from_json(&text), expected, "{}", text);
        }

        #[test]
        fn what_is_shown_reads_as_the_same_amount(amount: i64) {
            let shown = Nanodollars(amount).to_string().replacen('$', "", 1);
            if amount == i64::MIN {
                return Ok(()); // its positive has no i64
            }
            prop_assert_eq!(Nanodollars::from_json(&shown), Some(Nanodollars(amount)));
        }
    }

    /// To the nearest whole number, half to even; for what is not negative.
    pub(crate) fn half_even(exact: &BigRational) -> BigInt {
        let floor = exact.floor().to_integer();
        let rest = exact - BigRational::from_integer(floor.clone());
        let half = BigRational::new(BigInt::from(1), BigInt::from(2));
        let odd = &floor % 2 != BigInt::from(0);
        if rest > half || (rest == half && odd) {
            floor + 1
        } else {
            floor
        }
    }
}
