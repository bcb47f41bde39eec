//! Reads the wishes in a model's name: how slow, in how many pieces, and where to fail.

use std::time::Duration;

use axum::http::StatusCode;

/// How many pieces a stream has if nothing else is said.
pub const CHUNKS: usize = 20;

/// The pause between two pieces if nothing else is said: slow enough to be seen streaming.
pub const GAP: Duration = Duration::from_millis(30);

/// Longest pause that can be asked for: an hour.
const MAX_MS: u64 = 3_600_000;

/// Most pieces that can be asked for; bounds the memory of an answer.
const MAX_CHUNKS: usize = 100_000;

/// Scripts with a name of their own: name, wishes, and what it shows, for people.
pub const PRESETS: [(&str, &str, &str); 9] = [
    ("demo", "", "answers at once, streams for half a second"),
    (
        "demo-slow",
        "delay_ms=3000&gap_ms=250",
        "thinks for 3 s, then streams slowly",
    ),
    ("demo-fail", "status=503", "always answers 503"),
    (
        "demo-overloaded",
        "status=529",
        "always answers 529, as an overloaded model does",
    ),
    (
        "demo-limited",
        "status=429&retry_after=2",
        "always answers 429 with retry-after: 2",
    ),
    ("demo-hang", "hang=1", "takes the request and never answers"),
    (
        "demo-break",
        "break_after=3",
        "cuts the connection after 3 pieces",
    ),
    (
        "demo-error",
        "error_after=3",
        "sends an error event after 3 pieces",
    ),
    ("demo-stall", "hang_after=3", "falls silent after 3 pieces"),
];

/// What a call to the demo is to look like.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Script {
    /// Before the head.
    pub delay: Duration,
    /// Answer with this error.
    pub status: Option<StatusCode>,
    /// Seconds, for the error's `retry-after`.
    pub retry_after: Option<u64>,
    /// Never answer.
    pub hang: bool,
    /// Pieces of the answer, at least one.
    pub chunks: usize,
    /// Between two pieces.
    pub gap: Duration,
    /// After the head.
    pub ending: Ending,
}

/// How an answer ends. The numbers are pieces of content sent before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// As the dialect has it.
    Proper,
    /// The connection is cut without a proper end.
    BreakAfter(usize),
    /// An error event comes, then a proper end of the connection's body.
    ErrorAfter(usize),
    /// Nothing more comes, and the connection stays open.
    HangAfter(usize),
}

impl Default for Script {
    fn default() -> Self {
        Script {
            delay: Duration::ZERO,
            status: None,
            retry_after: None,
            hang: false,
            chunks: CHUNKS,
            gap: GAP,
            ending: Ending::Proper,
        }
    }
}

impl Script {
    /// The script in `model`: a preset's or none, then the wishes after the question mark.
    ///
    /// # Errors
    /// A sentence for the caller, if a wish is unknown or its value out of range.
    pub fn of(model: &str) -> Result<Script, String> {
        let (name, wishes) = model.split_once('?').unwrap_or((model, ""));
        // `demo/demo-slow` as aggregators spell it, `demo-slow:latest` as Ollama does.
        let name = name.rsplit('/').next().unwrap_or(name);
        let name = name.split(':').next().unwrap_or(name);
        let preset = PRESETS.iter().find(|(preset, ..)| *preset == name);

        let mut script = Script::default();
        if let Some((_, wishes, _)) = preset {
            script.add(wishes)?;
        }
        script.add(wishes)?;
        Ok(script)
    }

    fn add(&mut self, wishes: &str) -> Result<(), String> {
        let mut ended_by = None;
        for wish in wishes.split('&').filter(|wish| !wish.is_empty()) {
            let (key, value) = wish.split_once('=').unwrap_or((wish, "1"));
            let number = |least: u64, most: u64| match value.parse() {
                Ok(number) if (least..=most).contains(&number) => Ok(number),
                _ => Err(format!(
                    "the demo model's `{key}` takes a number from {least} to {most}, not `{value}`"
                )),
            };
            let pieces = || Ok::<_, String>(number(0, MAX_CHUNKS as u64)? as usize);
            match key {
                "delay_ms" => self.delay = Duration::from_millis(number(0, MAX_MS)?),
                "gap_ms" => self.gap = Duration::from_millis(number(0, MAX_MS)?),
                "chunks" => self.chunks = number(1, MAX_CHUNKS as u64)? as usize,
                "status" => {
                    // In range, so the conversions hold.
                    let status = u16::try_from(number(400, 599)?).unwrap_or(500);
                    self.status = StatusCode::from_u16(status).ok();
                }
                "retry_after" => self.retry_after = Some(number(0, MAX_MS)?),
                "hang" => self.hang = number(0, 1)? == 1,
                "break_after" => self.ending = Ending::BreakAfter(pieces()?),
                "error_after" => self.ending = Ending::ErrorAfter(pieces()?),
                "hang_after" => self.ending = Ending::HangAfter(pieces()?),
                _ => {
                    return Err(format!(
                        "the demo model does not know `{key}`; it knows delay_ms, chunks, gap_ms, \
                         status, retry_after, hang, break_after, error_after and hang_after"
                    ));
                }
            }
            if matches!(key, "break_after" | "error_after" | "hang_after")
                && let Some(other) = ended_by.replace(key)
            {
                return Err(format!(
                    "an answer ends by `{other}` or by `{key}`, not by both"
                ));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_name_is_a_model() {
        for name in [
            "",
            "demo",
            "gpt-9",
            "vendor/name:free",
            "demo?",
            "demo:latest",
        ] {
            assert_eq!(Script::of(name), Ok(Script::default()), "{name}");
        }
    }

    #[test]
    fn wishes_are_read() {
        let script = Script::of("x?delay_ms=1500&chunks=7&gap_ms=40&retry_after=9&hang_after=2");
        let expected = Script {
            delay: Duration::from_millis(1500),
            chunks: 7,
            gap: Duration::from_millis(40),
            retry_after: Some(9),
            ending: Ending::HangAfter(2),
            ..Script::default()
        };
        assert_eq!(script, Ok(expected));
        assert!(Script::of("x?hang").is_ok_and(|script| script.hang));
    }

    #[test]
    fn presets_hold_and_can_be_changed() {
        for (name, wishes, _) in PRESETS {
            assert_eq!(
                Script::of(name),
                Script::of(&format!("any?{wishes}")),
                "{name}"
            );
        }
        let slow = Script::of("demo/demo-slow:latest?gap_ms=1").expect("known wishes");
        assert_eq!(
            (slow.delay, slow.gap),
            (Duration::from_secs(3), Duration::from_millis(1))
        );
        let broken = Script::of("demo-break?error_after=1").expect("a wish beats the preset");
        assert_eq!(broken.ending, Ending::ErrorAfter(1));
    }

    #[test]
    fn nonsense_is_named() {
        for (model, word) in [
            ("demo?sleep=1", "`sleep`"),
            ("demo?chunks=0", "from 1"),
            ("demo?delay_ms=soon", "`soon`"),
            ("demo?delay_ms=3600001", "3600000"),
            ("demo?status=200", "from 400"),
            ("demo?break_after=1&error_after=1", "not by both"),
        ] {
            let error = Script::of(model).expect_err(model);
            assert!(error.contains(word), "{model}: {error}");
        }
    }
}
