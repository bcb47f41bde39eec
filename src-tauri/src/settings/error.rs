//! What is wrong with the settings, said so that a person can mend it.

use std::fmt;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// Why the settings were refused: where, which field, what it must be, what to do.
///
/// It never repeats a key, an address with a credential in it, or a line of the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SettingsError {
    /// The settings file; `None` where a flag or its environment variable is at fault.
    pub file: Option<PathBuf>,
    /// Counted from 1. `None` where no single line is at fault (an unreadable file, a flag).
    pub line: Option<u32>,
    /// Counted from 1, in characters.
    pub column: Option<u32>,
    /// As a person would point at it: `[server] port`, `provider "x" timeout_secs`, `--port`.
    /// Empty where the file as a whole is at fault.
    pub field: String,
    /// Continues the field's name: "must be …, is …".
    pub reason: String,
    /// A suggestion, a sentence of its own.
    pub help: Option<String>,
}

impl fmt::Display for SettingsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut separator = "";
        if let Some(file) = &self.file {
            let name = file.file_name().unwrap_or(file.as_os_str());
            f.write_str(&name.to_string_lossy())?;
            separator = ", ";
        }
        if let Some(line) = self.line {
            write!(f, "{separator}line {line}")?;
            separator = ", ";
        }
        if !self.field.is_empty() {
            write!(f, "{separator}{}", self.field)?;
            separator = ", ";
        }
        // Nothing in front of it where whoever shows it has named the file.
        let colon = if separator.is_empty() { "" } else { ": " };
        write!(f, "{colon}{}", self.reason)?;
        if let Some(help) = &self.help {
            write!(f, ". {help}")?;
        }
        Ok(())
    }
}

impl std::error::Error for SettingsError {}

/// A [`SettingsError`] that knows its place as an offset; the text turns it into a line.
#[derive(Debug)]
pub(super) struct Fault {
    at: Option<Range<usize>>,
    field: String,
    reason: String,
    help: Option<String>,
}

impl Fault {
    pub(super) fn new(
        at: Option<Range<usize>>,
        field: impl Into<String>,
        reason: impl Into<String>,
    ) -> Self {
        Self {
            at,
            field: field.into(),
            reason: reason.into(),
            help: None,
        }
    }

    pub(super) fn help(mut self, help: impl Into<String>) -> Self {
        self.help = Some(help.into());
        self
    }

    /// `text` is what was parsed, `file` where it came from.
    pub(super) fn locate(self, text: &str, file: &Path) -> SettingsError {
        let place = self.at.map(|span| line_and_column(text, span.start));
        SettingsError {
            file: Some(file.to_owned()),
            line: place.map(|(line, _)| line),
            column: place.map(|(_, column)| column),
            field: self.field,
            reason: self.reason,
            help: self.help,
        }
    }

    /// For a flag, which has no place in the file.
    pub(super) fn of_a_flag(self) -> SettingsError {
        SettingsError {
            file: None,
            line: None,
            column: None,
            field: self.field,
            reason: self.reason,
            help: self.help,
        }
    }
}

/// Both counted from 1. An offset past the end is the end.
pub(super) fn line_and_column(text: &str, offset: usize) -> (u32, u32) {
    let mut offset = offset.min(text.len());
    while !text.is_char_boundary(offset) {
        offset -= 1;
    }
    let before = &text[..offset];
    let start = before.rfind('\n').map_or(0, |at| at + 1);
    let count = |items: usize| u32::try_from(items + 1).unwrap_or(u32::MAX);
    (
        count(before.matches('\n').count()),
        count(before[start..].chars().count()),
    )
}

/// The known word a mistyped one most likely meant.
///
/// Half a word counts where it is the beginning of only one: `timeout` means `timeout_secs`.
pub(super) fn closest<'k>(word: &str, known: &[&'k str]) -> Option<&'k str> {
    let word = word.to_lowercase();
    let near = known
        .iter()
        .map(|candidate| (distance(&word, candidate), *candidate))
        .min()
        .filter(|(steps, candidate)| *steps <= (candidate.len() / 3).clamp(1, 3))
        .map(|(_, candidate)| candidate);
    near.or_else(|| {
        let mut longer = known
            .iter()
            .filter(|candidate| word.len() >= 3 && candidate.starts_with(word.as_str()));
        match (longer.next(), longer.next()) {
            (Some(only), None) => Some(*only),
            _ => None,
        }
    })
}

/// Edits (insert, delete, replace, swap of neighbours) that turn one word into the other.
fn distance(left: &str, right: &str) -> usize {
    let left: Vec<char> = left.chars().collect();
    let right: Vec<char> = right.chars().collect();
    let mut rows = vec![(0..=right.len()).collect::<Vec<usize>>()];
    for (i, l) in left.iter().enumerate() {
        let mut row = vec![i + 1];
        for (j, r) in right.iter().enumerate() {
            let mut steps = (rows[i][j] + usize::from(l != r))
                .min(rows[i][j + 1] + 1)
                .min(row[j] + 1);
            if i > 0 && j > 0 && *l == right[j - 1] && left[i - 1] == *r {
                steps = steps.min(rows[i - 1][j - 1] + 1);
            }
            row.push(steps);
        }
        rows.push(row);
    }
    rows[left.len()][right.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_counted_in_lines_and_characters() {
        let text = "a = 1\nü = \"ö\"\r\nc";
        assert_eq!(line_and_column(text, 0), (1, 1));
        assert_eq!(line_and_column(text, text.find('ö').unwrap()), (2, 6));
        assert_eq!(line_and_column(text, text.find('c').unwrap()), (3, 1));
        assert_eq!(line_and_column(text, 999), (3, 2));
    }

    #[test]
    fn a_typo_finds_its_word_and_a_stranger_none() {
        let known = [
            "timeout_secs",
            "unstreamed_timeout_secs",
            "idle_secs",
            "port",
        ];
        assert_eq!(closest("timeout_sec", &known), Some("timeout_secs"));
        assert_eq!(closest("timeoutsecs", &known), Some("timeout_secs"));
        assert_eq!(closest("timeout", &known), Some("timeout_secs"));
        assert_eq!(closest("prot", &known), Some("port"));
        assert_eq!(closest("Port", &known), Some("port"));
        assert_eq!(closest("colour", &known), None);
    }

    #[test]
    fn an_error_reads_as_one_line() {
        let fault = Fault::new(
            Some(7..8),
            "provider \"x\" timeout_secs",
            "must be more, is 0",
        )
        .help("Try 1.");
        assert_eq!(
            fault
                .locate("a = 1\n\nb", Path::new("/home/me/config.toml"))
                .to_string(),
            "config.toml, line 3, provider \"x\" timeout_secs: must be more, is 0. Try 1."
        );
        let flag = Fault::new(None, "--port", "must be less").of_a_flag();
        assert_eq!(flag.to_string(), "--port: must be less");
        let alone = Fault::new(None, "", "cannot be read").of_a_flag();
        assert_eq!(alone.to_string(), "cannot be read");
    }
}
