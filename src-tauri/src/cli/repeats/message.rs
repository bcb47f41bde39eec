//! A row of somebody's log of conversations, under whatever names it has.
//!
//! Read by hand-written visitors: unknown fields cost nothing, a known one may come under two
//! names in one row (the first that is not null counts), and text is borrowed from the line.

use std::borrow::Cow;
use std::fmt;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};

use jiff::Timestamp;
use jiff::civil::DateTime;
use jiff::tz::TimeZone;
use serde::de::value::{MapAccessDeserializer, SeqAccessDeserializer};
use serde::de::{Deserialize, Deserializer, Error, IgnoredAny, MapAccess, SeqAccess, Visitor};

use crate::policy::repeats::Turn;

/// What a field of a row or message holds, by its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Field {
    Messages,
    Role,
    Content,
    /// What a user said, of a row that has no roles.
    Prompt,
    Time,
    User,
    Model,
    /// Of the conversation.
    Id,
    Other,
}

impl Field {
    pub(super) fn named(name: &str) -> Self {
        match name {
            "messages" | "conversation" | "conversations" => Self::Messages,
            "role" | "from" => Self::Role,
            "content" | "value" => Self::Content,
            "prompt" | "text" | "input" | "question" | "instruction" => Self::Prompt,
            "timestamp" | "time" | "created" | "created_at" | "create_time" | "tstamp" | "ts"
            | "date" => Self::Time,
            "user" | "user_id" | "hashed_ip" | "username" => Self::User,
            "model" | "model_name" => Self::Model,
            "conversation_id" | "conversation_hash" | "chat_id" | "session_id" | "thread_id" => {
                Self::Id
            }
            _ => Self::Other,
        }
    }
}

/// Which user it was: only ever compared, so that a hash will do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct User(pub(super) u32);

/// A row: a conversation, a call with its messages, or a single message.
#[derive(Debug, Default)]
pub(super) struct Row<'a> {
    pub(super) messages: Option<Vec<Message<'a>>>,
    /// The row's own time, user, role and content.
    pub(super) own: Message<'a>,
    pub(super) prompt: Option<Cow<'a, str>>,
    pub(super) model: Option<Cow<'a, str>>,
    pub(super) id: Option<Cow<'a, str>>,
}

/// Something that somebody said.
#[derive(Debug, Default)]
pub(super) struct Message<'a> {
    pub(super) role: Option<Cow<'a, str>>,
    pub(super) content: Option<Cow<'a, str>>,
    /// Unix microseconds.
    pub(super) at: Option<i64>,
    pub(super) user: Option<User>,
}

impl Message<'_> {
    /// The role by one name, whatever its log calls it.
    pub(super) fn role(&self) -> Option<&str> {
        self.role.as_deref().map(|role| match role {
            "human" | "prompter" => USER,
            "gpt" | "chatgpt" | "bot" | "model" => "assistant",
            role => role,
        })
    }
}

/// The role whose messages are turns.
pub(super) const USER: &str = "user";

impl<'de> Deserialize<'de> for Field {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Name;
        impl Visitor<'_> for Name {
            type Value = Field;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a field's name")
            }
            fn visit_str<E: Error>(self, name: &str) -> Result<Field, E> {
                Ok(Field::named(name))
            }
        }
        deserializer.deserialize_identifier(Name)
    }
}

impl<'de> Deserialize<'de> for Row<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Any;
        impl<'de> Visitor<'de> for Any {
            type Value = Row<'de>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object, or a list of messages")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Row<'de>, A::Error> {
                let mut row = Row::default();
                while let Some(field) = map.next_key()? {
                    match field {
                        Field::Messages => {
                            let Messages(messages) = map.next_value()?;
                            row.messages = row.messages.take().or(messages);
                        }
                        Field::Prompt => first(&mut row.prompt, &mut map)?,
                        Field::Model => first(&mut row.model, &mut map)?,
                        Field::Id => first(&mut row.id, &mut map)?,
                        field => row.own.take(field, &mut map)?,
                    }
                }
                Ok(row)
            }
            fn visit_seq<A: SeqAccess<'de>>(self, list: A) -> Result<Row<'de>, A::Error> {
                Ok(Row {
                    messages: Some(messages_of(list)?),
                    ..Row::default()
                })
            }
        }
        deserializer.deserialize_any(Any)
    }
}

impl<'de> Message<'de> {
    fn take<A: MapAccess<'de>>(&mut self, field: Field, map: &mut A) -> Result<(), A::Error> {
        match field {
            Field::Role => first(&mut self.role, map),
            Field::Content => first(&mut self.content, map),
            Field::Time => {
                let Time(at) = map.next_value()?;
                self.at = self.at.or(at);
                Ok(())
            }
            Field::User => {
                let Text(name) = map.next_value()?;
                let user = name.filter(|name| !name.is_empty()).map(|name| {
                    let mut hasher = DefaultHasher::new();
                    name.hash(&mut hasher);
                    let half = u32::try_from(hasher.finish() >> 32).unwrap_or(u32::MAX);
                    User(if half == Turn::NOBODY { 1 } else { half })
                });
                self.user = self.user.or(user);
                Ok(())
            }
            _ => map.next_value::<IgnoredAny>().map(drop),
        }
    }
}

/// Fills `place`, unless it is filled or the value is null.
fn first<'de, A: MapAccess<'de>>(
    place: &mut Option<Cow<'de, str>>,
    map: &mut A,
) -> Result<(), A::Error> {
    let Text(text) = map.next_value()?;
    *place = place.take().or(text);
    Ok(())
}

impl<'de> Deserialize<'de> for Message<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Any;
        impl<'de> Visitor<'de> for Any {
            type Value = Message<'de>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a message with role and content")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Message<'de>, A::Error> {
                let mut message = Message::default();
                while let Some(field) = map.next_key()? {
                    // Some say `text` for `content` here.
                    let field = match field {
                        Field::Prompt => Field::Content,
                        field => field,
                    };
                    message.take(field, &mut map)?;
                }
                Ok(message)
            }
        }
        deserializer.deserialize_map(Any)
    }
}

/// A list of messages; `None` of anything else, for `conversation` may be a name.
struct Messages<'a>(Option<Vec<Message<'a>>>);

impl<'de> Deserialize<'de> for Messages<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Any;
        impl<'de> Visitor<'de> for Any {
            type Value = Messages<'de>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a list of messages")
            }
            fn visit_seq<A: SeqAccess<'de>>(self, list: A) -> Result<Messages<'de>, A::Error> {
                messages_of(list).map(|messages| Messages(Some(messages)))
            }
            fn visit_str<E: Error>(self, _: &str) -> Result<Messages<'de>, E> {
                Ok(Messages(None))
            }
            fn visit_unit<E: Error>(self) -> Result<Messages<'de>, E> {
                Ok(Messages(None))
            }
        }
        deserializer.deserialize_any(Any)
    }
}

fn messages_of<'de, A: SeqAccess<'de>>(mut list: A) -> Result<Vec<Message<'de>>, A::Error> {
    let mut messages = Vec::new();
    while let Some(message) = list.next_element()? {
        messages.push(message);
    }
    Ok(messages)
}

/// Text; `None` of null. Anything else (a list of parts, say) stands as its JSON.
struct Text<'a>(Option<Cow<'a, str>>);

impl<'de> Deserialize<'de> for Text<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Any;
        impl<'de> Visitor<'de> for Any {
            type Value = Text<'de>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("text")
            }
            fn visit_borrowed_str<E: Error>(self, text: &'de str) -> Result<Text<'de>, E> {
                Ok(Text(Some(text.into())))
            }
            fn visit_str<E: Error>(self, text: &str) -> Result<Text<'de>, E> {
                Ok(Text(Some(text.to_owned().into())))
            }
            fn visit_string<E: Error>(self, text: String) -> Result<Text<'de>, E> {
                Ok(Text(Some(text.into())))
            }
            fn visit_unit<E: Error>(self) -> Result<Text<'de>, E> {
                Ok(Text(None))
            }
            fn visit_bool<E: Error>(self, value: bool) -> Result<Text<'de>, E> {
                self.visit_string(value.to_string())
            }
            fn visit_i64<E: Error>(self, value: i64) -> Result<Text<'de>, E> {
                self.visit_string(value.to_string())
            }
            fn visit_u64<E: Error>(self, value: u64) -> Result<Text<'de>, E> {
                self.visit_string(value.to_string())
            }
            fn visit_f64<E: Error>(self, value: f64) -> Result<Text<'de>, E> {
                self.visit_string(value.to_string())
            }
            fn visit_seq<A: SeqAccess<'de>>(self, list: A) -> Result<Text<'de>, A::Error> {
                let json = serde_json::Value::deserialize(SeqAccessDeserializer::new(list))?;
                self.visit_string(json.to_string())
            }
            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Text<'de>, A::Error> {
                let json = serde_json::Value::deserialize(MapAccessDeserializer::new(map))?;
                self.visit_string(json.to_string())
            }
        }
        deserializer.deserialize_any(Any)
    }
}

/// A time in Unix microseconds; `None` of null and of nothing.
struct Time(Option<i64>);

impl<'de> Deserialize<'de> for Time {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Any;
        impl Visitor<'_> for Any {
            type Value = Time;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a time as RFC 3339 text or a Unix time")
            }
            fn visit_str<E: Error>(self, text: &str) -> Result<Time, E> {
                let text = text.trim();
                if text.is_empty() {
                    return Ok(Time(None));
                }
                let time = of_text(text);
                time.map(|time| Time(Some(time))).ok_or_else(|| {
                    let begin: String = text.chars().take(40).collect();
                    E::custom(format_args!(
                        "{begin:?} is no time: neither RFC 3339 nor a Unix time"
                    ))
                })
            }
            fn visit_unit<E: Error>(self) -> Result<Time, E> {
                Ok(Time(None))
            }
            fn visit_i64<E: Error>(self, time: i64) -> Result<Time, E> {
                Ok(Time(Some(of_number(time))))
            }
            fn visit_u64<E: Error>(self, time: u64) -> Result<Time, E> {
                self.visit_i64(i64::try_from(time).unwrap_or(i64::MAX))
            }
            fn visit_f64<E: Error>(self, time: f64) -> Result<Time, E> {
                Ok(Time(of_fraction(time)))
            }
        }
        deserializer.deserialize_any(Any)
    }
}

fn of_text(text: &str) -> Option<i64> {
    if let Ok(number) = text.parse() {
        return Some(of_number(number));
    }
    if let Ok(number) = text.parse() {
        return of_fraction(number);
    }
    let text = text.strip_suffix(" UTC").unwrap_or(text);
    if let Ok(time) = text.parse::<Timestamp>() {
        return Some(time.as_microsecond());
    }
    let time: DateTime = text.parse().ok()?;
    let time = time.to_zoned_datetime(TimeZone::UTC).ok()?;
    Some(time.timestamp().as_microsecond())
}

/// Seconds, milliseconds, microseconds or nanoseconds, by size: as seconds 10¹¹ is the year 5138,
/// as milliseconds 1973.
fn of_number(time: i64) -> i64 {
    match time.unsigned_abs() {
        0..100_000_000_000 => time * 1_000_000,
        100_000_000_000..100_000_000_000_000 => time * 1000,
        100_000_000_000_000..100_000_000_000_000_000 => time,
        _ => time / 1000,
    }
}

fn of_fraction(time: f64) -> Option<i64> {
    if !time.is_finite() {
        return None;
    }
    let micros = match time.abs() {
        size if size < 1e11 => time * 1e6,
        size if size < 1e14 => time * 1e3,
        size if size < 1e17 => time,
        _ => time / 1e3,
    };
    #[expect(clippy::cast_possible_truncation, reason = "it saturates")]
    Some(micros.round() as i64)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(json: &str) -> Row<'_> {
        serde_json::from_str(json).expect(json)
    }

    #[test]
    fn times_are_read_in_every_usual_form() {
        let expected = Some(1_680_998_573_000_000);
        for time in [
            r#""2023-04-09T00:02:53Z""#,
            r#""2023-04-09T02:02:53+02:00""#,
            r#""2023-04-09 00:02:53+00:00""#,
            r#""2023-04-09 00:02:53 UTC""#,
            r#""2023-04-09T00:02:53""#,
            r#""2023-04-09 00:02:53.000000""#,
            "1680998573",
            "1680998573.0",
            "1680998573000",
            "1680998573000000",
            "1680998573000000000",
            r#""1680998573""#,
            r#""1680998573.0""#,
        ] {
            for name in ["timestamp", "time", "created", "created_at", "tstamp"] {
                let json = format!("{{\"{name}\":{time}}}");
                assert_eq!(row(&json).own.at, expected, "{json}");
            }
        }
        assert_eq!(
            row(r#"{"created":1680998573.25}"#).own.at,
            expected.map(|at| at + 250_000)
        );
        for nothing in ["null", r#""""#] {
            assert_eq!(row(&format!("{{\"time\":{nothing}}}")).own.at, None);
        }
        for wrong in [
            r#"{"time":"soon"}"#,
            r#"{"time":[]}"#,
            r#"{"time":"2023-13-01"}"#,
        ] {
            serde_json::from_str::<Row>(wrong).expect_err(wrong);
        }
    }

    #[test]
    fn of_two_names_the_first_that_says_something_counts() {
        let row = row(
            r#"{"user":null,"hashed_ip":"a","user_id":"b","conversation":"c1","messages":[],"timestamp":1,"created":2}"#,
        );
        let a = serde_json::from_str::<Row>(r#"{"user":"a"}"#)
            .expect("a row")
            .own
            .user;
        assert!(a.is_some());
        assert_eq!(row.own.user, a);
        assert_eq!(row.own.at, Some(1_000_000));
        assert_eq!(row.messages.map(|messages| messages.len()), Some(0));
    }

    #[test]
    fn content_that_is_no_text_stands_as_json_and_escapes_are_read() {
        let parts = row(r#"[{"from":"human","value":[{"type":"text", "text":"hi"}]}]"#);
        let messages = parts.messages.expect("messages");
        assert_eq!(messages[0].role(), Some(USER));
        assert_eq!(
            messages[0].content.as_deref(),
            Some(r#"[{"text":"hi","type":"text"}]"#)
        );
        let escaped = row(r#"{"role":"us\u0065r","content":"a\nb"}"#);
        assert_eq!(escaped.own.role(), Some(USER));
        assert_eq!(escaped.own.content.as_deref(), Some("a\nb"));
    }
}
