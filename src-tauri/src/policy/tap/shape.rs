//! JSON values of which only the outermost shape is of interest.
//!
//! Providers differ in what they put where: null for absent, a number for a
//! string, a list for a text. A field read as a [`Shape`] or as [`Filled`]
//! takes any of it, so that one odd field does not hide the others.

use std::borrow::Cow;
use std::fmt;

use serde::de::{Deserialize, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};

/// Reads JSON as `T`; `None` if it is none, or none that fits.
pub(super) fn parse<'a, T: Deserialize<'a>>(json: &'a [u8]) -> Option<T> {
    match std::str::from_utf8(json) {
        // Checked as a whole once, which is a good deal faster than text by text.
        Ok(json) => serde_json::from_str(json).ok(),
        // Fields that are not looked at may hold what they like.
        Err(_) => serde_json::from_slice(json).ok(),
    }
}

/// A value's kind, and the value itself where it is a simple one.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) enum Shape<'a> {
    /// Null or absent.
    #[default]
    Null,
    Bool(bool),
    Count(u64),
    Text(Cow<'a, str>),
    /// A list, an object, or a number that is no count.
    Other,
}

impl Shape<'_> {
    pub(super) fn text(&self) -> Option<&str> {
        match self {
            Self::Text(text) => Some(text),
            _ => None,
        }
    }

    pub(super) fn is_true(&self) -> bool {
        *self == Self::Bool(true)
    }
}

impl<'de: 'a, 'a> Deserialize<'de> for Shape<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(ShapeVisitor)
    }
}

struct ShapeVisitor;

impl<'de> Visitor<'de> for ShapeVisitor {
    type Value = Shape<'de>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any value")
    }

    fn visit_unit<E>(self) -> Result<Self::Value, E> {
        Ok(Shape::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Self::Value, E> {
        Ok(Shape::Bool(value))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Self::Value, E> {
        Ok(Shape::Count(value))
    }

    fn visit_i64<E>(self, _: i64) -> Result<Self::Value, E> {
        Ok(Shape::Other)
    }

    fn visit_f64<E>(self, _: f64) -> Result<Self::Value, E> {
        Ok(Shape::Other)
    }

    fn visit_borrowed_str<E>(self, text: &'de str) -> Result<Self::Value, E> {
        Ok(Shape::Text(Cow::Borrowed(text)))
    }

    fn visit_str<E>(self, text: &str) -> Result<Self::Value, E> {
        Ok(Shape::Text(Cow::Owned(text.to_owned())))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, seq: A) -> Result<Self::Value, A::Error> {
        drain_seq(seq)?;
        Ok(Shape::Other)
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Self::Value, A::Error> {
        drain_map(map)?;
        Ok(Shape::Other)
    }
}

/// Whether there is something in a value: it is neither null, false nor empty.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Filled(pub(super) bool);

impl<'de> Deserialize<'de> for Filled {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(FilledVisitor)
    }
}

struct FilledVisitor;

impl<'de> Visitor<'de> for FilledVisitor {
    type Value = Filled;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any value")
    }

    fn visit_unit<E>(self) -> Result<Self::Value, E> {
        Ok(Filled(false))
    }

    fn visit_bool<E>(self, value: bool) -> Result<Self::Value, E> {
        Ok(Filled(value))
    }

    fn visit_u64<E>(self, _: u64) -> Result<Self::Value, E> {
        Ok(Filled(true))
    }

    fn visit_i64<E>(self, _: i64) -> Result<Self::Value, E> {
        Ok(Filled(true))
    }

    fn visit_f64<E>(self, _: f64) -> Result<Self::Value, E> {
        Ok(Filled(true))
    }

    fn visit_str<E>(self, text: &str) -> Result<Self::Value, E> {
        Ok(Filled(!text.is_empty()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, seq: A) -> Result<Self::Value, A::Error> {
        Ok(Filled(drain_seq(seq)?))
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Self::Value, A::Error> {
        Ok(Filled(drain_map(map)?))
    }
}

/// Passes over a list; true if there was anything in it.
fn drain_seq<'de, A: SeqAccess<'de>>(mut seq: A) -> Result<bool, A::Error> {
    let mut any = false;
    while seq.next_element::<IgnoredAny>()?.is_some() {
        any = true;
    }
    Ok(any)
}

/// Passes over an object; true if there was anything in it.
fn drain_map<'de, A: MapAccess<'de>>(mut map: A) -> Result<bool, A::Error> {
    let mut any = false;
    while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {
        any = true;
    }
    Ok(any)
}

/// What the items of a list add up to, taken one by one without keeping them.
pub(super) trait Tally<'de>: Default {
    type Item: Deserialize<'de>;

    fn add(&mut self, item: Self::Item);
}

/// A list field as its [`Tally`]; null and anything that is no list count as empty.
pub(super) fn tally<'de, T: Tally<'de>, D: Deserializer<'de>>(
    deserializer: D,
) -> Result<T, D::Error> {
    deserializer.deserialize_any(TallyVisitor(T::default()))
}

struct TallyVisitor<T>(T);

impl<'de, T: Tally<'de>> Visitor<'de> for TallyVisitor<T> {
    type Value = T;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list")
    }

    fn visit_unit<E>(self) -> Result<T, E> {
        Ok(self.0)
    }

    fn visit_bool<E>(self, _: bool) -> Result<T, E> {
        Ok(self.0)
    }

    fn visit_u64<E>(self, _: u64) -> Result<T, E> {
        Ok(self.0)
    }

    fn visit_i64<E>(self, _: i64) -> Result<T, E> {
        Ok(self.0)
    }

    fn visit_f64<E>(self, _: f64) -> Result<T, E> {
        Ok(self.0)
    }

    fn visit_str<E>(self, _: &str) -> Result<T, E> {
        Ok(self.0)
    }

    fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<T, A::Error> {
        drain_map(map)?;
        Ok(self.0)
    }

    fn visit_seq<A: SeqAccess<'de>>(mut self, mut seq: A) -> Result<T, A::Error> {
        while let Some(item) = seq.next_element()? {
            self.0.add(item);
        }
        Ok(self.0)
    }
}
