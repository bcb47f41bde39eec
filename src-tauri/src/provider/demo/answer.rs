//! Decides what is said: a friendly echo, a tool call, or JSON of a demanded shape.

use serde_json::{Map, Value, json};

use super::script::Script;

/// The echo quotes at most so much of the prompt, in characters.
const QUOTED: usize = 160;

/// Deepest schema that is followed; some refer to themselves.
const MAX_DEPTH: usize = 8;

/// What a request asks, whatever its dialect.
#[derive(Debug, Default)]
pub struct Ask {
    pub turn: Turn,
    pub tools: Vec<Tool>,
    pub tool_choice: ToolChoice,
    /// The JSON schema the text must fit.
    pub shape: Option<Value>,
    pub stream: bool,
    /// In tokens.
    pub max_tokens: Option<usize>,
    /// In tokens.
    pub input_tokens: usize,
}

/// Who spoke last.
#[derive(Debug, PartialEq, Eq)]
pub enum Turn {
    Prompt(String),
    ToolResult(String),
}

impl Default for Turn {
    fn default() -> Self {
        Turn::Prompt(String::new())
    }
}

/// A function the client offers.
#[derive(Debug)]
pub struct Tool {
    pub name: String,
    /// A JSON schema; null if there is none.
    pub parameters: Value,
}

#[derive(Debug, Default, PartialEq, Eq)]
pub enum ToolChoice {
    #[default]
    Auto,
    Never,
    Any,
    Named(String),
}

impl ToolChoice {
    /// Reads any dialect's `tool_choice`: `"none"`, `"required"`, `{"type": "any"}`,
    /// `{"type": "tool", "name": …}`, `{"type": "function", "function": {"name": …}}`, …
    pub fn of(value: &Value) -> ToolChoice {
        let name = value["name"]
            .as_str()
            .or(value["function"]["name"].as_str());
        match (name, value.as_str().or(value["type"].as_str())) {
            (Some(name), _) => ToolChoice::Named(name.to_owned()),
            (None, Some("none")) => ToolChoice::Never,
            (None, Some("required" | "any")) => ToolChoice::Any,
            _ => ToolChoice::Auto,
        }
    }
}

/// What is said, cut into the pieces a stream sends.
#[derive(Debug)]
pub struct Answer {
    /// The called tool; the pieces are then the JSON text of its arguments.
    pub tool: Option<String>,
    pub pieces: Vec<String>,
    /// Cut short by `max_tokens`.
    pub cut: bool,
    pub input_tokens: usize,
    pub output_tokens: usize,
}

impl Answer {
    pub fn to(ask: &Ask, script: &Script) -> Answer {
        if let Some(tool) = ask.called_tool() {
            let arguments = sample(&tool.parameters, &tool.parameters, 0);
            let arguments = if arguments.is_object() {
                arguments
            } else {
                json!({})
            };
            let arguments = arguments.to_string();
            return Answer {
                tool: Some(tool.name.clone()),
                output_tokens: tokens(arguments.chars().count() + tool.name.chars().count()),
                pieces: cut_letters(&arguments, script.chunks),
                cut: false,
                input_tokens: ask.input_tokens,
            };
        }

        let text = match &ask.shape {
            Some(shape) => sample(shape, shape, 0).to_string(),
            None => ask.turn.echo(script.chunks),
        };
        let (text, cut) = match ask.max_tokens.map(|tokens| tokens.saturating_mul(4)) {
            Some(most) if text.chars().count() > most => (text.chars().take(most).collect(), true),
            _ => (text, false),
        };
        Answer {
            tool: None,
            output_tokens: tokens(text.chars().count()),
            pieces: match ask.shape {
                Some(_) => cut_letters(&text, script.chunks),
                None => cut_words(&text, script.chunks),
            },
            cut,
            input_tokens: ask.input_tokens,
        }
    }

    /// The pieces put together.
    pub fn text(&self) -> String {
        self.pieces.concat()
    }
}

impl Ask {
    fn called_tool(&self) -> Option<&Tool> {
        let first = self.tools.first()?;
        match (&self.tool_choice, &self.turn) {
            (ToolChoice::Never, _) => None,
            (ToolChoice::Named(name), _) => self.tools.iter().find(|tool| tool.name == *name),
            (ToolChoice::Any, Turn::ToolResult(_)) => Some(first),
            // A tool's result ends the round, or an agent would go in circles.
            (ToolChoice::Auto, Turn::ToolResult(_)) => None,
            (choice, Turn::Prompt(prompt)) => {
                let prompt = prompt.to_lowercase();
                let says = |what: &str| {
                    ["call", "use"]
                        .iter()
                        .any(|verb| prompt.contains(&format!("{verb} {what}")))
                };
                let named = self.tools.iter().find(|tool| {
                    let name = tool.name.to_lowercase();
                    says(&name) || says(&format!("the {name}"))
                });
                let asked = *choice == ToolChoice::Any
                    || [
                        "a tool",
                        "the tool",
                        "your tool",
                        "a function",
                        "the function",
                    ]
                    .iter()
                    .any(|what| says(what));
                named.or(asked.then_some(first))
            }
        }
    }
}

impl Turn {
    /// The answer's text, of at least `words` words.
    fn echo(&self, words: usize) -> String {
        let mut text = match self {
            Turn::Prompt(prompt) if prompt.trim().is_empty() => "You asked nothing.".to_owned(),
            Turn::Prompt(prompt) => format!("You asked: \"{}\".", quote(prompt)),
            Turn::ToolResult(result) => format!("The tool answered: \"{}\".", quote(result)),
        };
        text.push_str(
            " This is Traygate's demo model speaking: it is built in, works offline and costs \
             nothing. It answers every prompt like this, so that you can watch a call go through.",
        );
        let missing = words.saturating_sub(text.split(' ').count());
        let more = "Here are a few more words, because a longer answer was asked for.".split(' ');
        for word in more.cycle().take(missing) {
            text.push(' ');
            text.push_str(word);
        }
        text
    }
}

/// One line of at most [`QUOTED`] characters.
fn quote(text: &str) -> String {
    let line = text.split_whitespace().collect::<Vec<_>>().join(" ");
    match line.char_indices().nth(QUOTED) {
        Some((end, _)) => format!("{}…", line[..end].trim_end()),
        None => line,
    }
}

/// A count near enough to a real one: a token is about four characters.
pub fn tokens(characters: usize) -> usize {
    characters.div_ceil(4).max(1)
}

/// Characters of text in all strings of `value`, pictures left out.
pub fn characters(value: &Value) -> usize {
    match value {
        Value::String(text) if text.starts_with("data:") => 0,
        Value::String(text) => text.chars().count(),
        Value::Array(values) => values.iter().map(characters).sum(),
        Value::Object(fields) => fields
            .iter()
            .filter(|(name, _)| !matches!(name.as_str(), "type" | "role" | "data" | "id"))
            .map(|(_, value)| characters(value))
            .sum(),
        Value::Null | Value::Bool(_) | Value::Number(_) => 0,
    }
}

/// Tokens of the request's own text: what stands in these fields, tools included.
pub fn input_tokens(body: &Value) -> usize {
    let fields = [
        "messages",
        "system",
        "prompt",
        "input",
        "instructions",
        "tools",
    ];
    tokens(fields.iter().map(|field| characters(&body[*field])).sum())
}

/// A message's content as text: a string, or the last of its parts that has a text. Agents put
/// their reminders into earlier parts and the person's words into the last.
pub fn content_text(content: &Value) -> String {
    match content {
        Value::String(text) => text.clone(),
        Value::Array(parts) => parts
            .iter()
            .rev()
            .find_map(|part| part.as_str().or(part["text"].as_str()))
            .unwrap_or_default()
            .to_owned(),
        _ => String::new(),
    }
}

/// A whole number of tokens, if the field holds one.
pub fn limit(value: &Value) -> Option<usize> {
    usize::try_from(value.as_u64()?).ok()
}

/// At most `pieces` runs of whole words, as even as can be.
fn cut_words(text: &str, pieces: usize) -> Vec<String> {
    cut(&text.split_inclusive(' ').collect::<Vec<_>>(), pieces)
}

/// At most `pieces` runs of about four characters or more.
fn cut_letters(text: &str, pieces: usize) -> Vec<String> {
    let letters: Vec<&str> = text
        .char_indices()
        .map(|(at, letter)| &text[at..at + letter.len_utf8()])
        .collect();
    cut(&letters, pieces.min(letters.len().div_ceil(4)))
}

fn cut(units: &[&str], pieces: usize) -> Vec<String> {
    let pieces = pieces.clamp(1, units.len().max(1));
    (0..pieces)
        .map(|n| units[n * units.len() / pieces..(n + 1) * units.len() / pieces].concat())
        .collect()
}

/// A value that fits `schema`; `root` is where its references point.
fn sample(schema: &Value, root: &Value, depth: usize) -> Value {
    if depth > MAX_DEPTH {
        return Value::Null;
    }
    for given in ["const", "default"] {
        if let Some(value) = schema.get(given) {
            return value.clone();
        }
    }
    for listed in ["enum", "examples"] {
        if let Some(value) = schema[listed].get(0) {
            return value.clone();
        }
    }
    if let Some(path) = schema["$ref"]
        .as_str()
        .and_then(|path| path.strip_prefix('#'))
    {
        return root
            .pointer(path)
            .map_or(Value::Null, |found| sample(found, root, depth + 1));
    }
    for branches in ["anyOf", "oneOf", "allOf"] {
        if let Some(first) = schema[branches].get(0) {
            return sample(first, root, depth + 1);
        }
    }
    let kind = schema["type"].as_str().or(schema["type"][0].as_str());
    match kind {
        Some("string") => json!("demo"),
        Some("integer" | "number") => schema.get("minimum").cloned().unwrap_or(json!(1)),
        Some("boolean") => json!(true),
        Some("array") => json!([sample(&schema["items"], root, depth + 1)]),
        Some("null") => Value::Null,
        _ => Value::Object(sample_fields(schema, root, depth)),
    }
}

/// The required fields; all of them if the schema does not say.
fn sample_fields(schema: &Value, root: &Value, depth: usize) -> Map<String, Value> {
    let required = schema["required"].as_array();
    let wanted = |name: &str| {
        required.is_none_or(|names| names.iter().any(|required| required.as_str() == Some(name)))
    };
    schema["properties"]
        .as_object()
        .into_iter()
        .flatten()
        .filter(|(name, _)| wanted(name))
        .map(|(name, field)| (name.clone(), sample(field, root, depth + 1)))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ask(prompt: &str) -> Ask {
        Ask {
            turn: Turn::Prompt(prompt.to_owned()),
            ..Ask::default()
        }
    }

    fn weather() -> Vec<Tool> {
        let parameters = json!({
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "unit": {"enum": ["celsius", "fahrenheit"]},
                "note": {"type": "string"},
            },
            "required": ["city", "unit"],
        });
        ["get_time", "get_weather"]
            .map(|name| Tool {
                name: name.to_owned(),
                parameters: parameters.clone(),
            })
            .into()
    }

    #[test]
    fn the_prompt_is_echoed_in_the_pieces_asked_for() {
        for chunks in [1, 2, 20, 61, 500] {
            let script = Script {
                chunks,
                ..Script::default()
            };
            let answer = Answer::to(&ask("  Why is\nthe sky blue? "), &script);
            assert_eq!(answer.pieces.len(), chunks);
            assert!(answer.pieces.iter().all(|piece| !piece.is_empty()));
            assert!(
                answer
                    .text()
                    .starts_with("You asked: \"Why is the sky blue?\". This is ")
            );
            assert_eq!(answer.output_tokens, answer.text().len().div_ceil(4));
        }
    }

    #[test]
    fn a_long_prompt_is_quoted_in_part_and_on_a_character() {
        let answer = Answer::to(&ask(&"é".repeat(5000)), &Script::default());
        assert!(
            answer
                .text()
                .contains(&format!("\"{}…\"", "é".repeat(QUOTED)))
        );
    }

    #[test]
    fn max_tokens_cuts() {
        let short = Ask {
            max_tokens: Some(3),
            ..ask("hi")
        };
        let answer = Answer::to(&short, &Script::default());
        assert_eq!(
            (answer.text().as_str(), answer.cut, answer.output_tokens),
            ("You asked: \"", true, 3)
        );
        let ample = Ask {
            max_tokens: Some(usize::MAX),
            ..ask("hi")
        };
        assert!(!Answer::to(&ample, &Script::default()).cut);
    }

    #[test]
    fn tools_are_called_when_asked_for() {
        let called = |prompt: &str, tool_choice| {
            let ask = Ask {
                tools: weather(),
                tool_choice,
                ..ask(prompt)
            };
            Answer::to(&ask, &Script::default()).tool
        };
        let name = |name: &str| Some(name.to_owned());
        assert_eq!(called("hello", ToolChoice::Auto), None);
        assert_eq!(
            called("Please call a tool", ToolChoice::Auto),
            name("get_time")
        );
        assert_eq!(
            called("Use the get_weather tool", ToolChoice::Auto),
            name("get_weather")
        );
        assert_eq!(called("call a tool", ToolChoice::Never), None);
        assert_eq!(called("hello", ToolChoice::Any), name("get_time"));
        assert_eq!(
            called("hello", ToolChoice::Named("get_weather".into())),
            name("get_weather")
        );
        assert_eq!(called("hello", ToolChoice::Named("unknown".into())), None);

        let result = Ask {
            tools: weather(),
            turn: Turn::ToolResult("call a tool".into()),
            ..Ask::default()
        };
        assert_eq!(Answer::to(&result, &Script::default()).tool, None);
    }

    #[test]
    fn arguments_fit_the_schema() {
        let ask = Ask {
            tools: weather(),
            ..ask("call a tool")
        };
        let arguments = Answer::to(&ask, &Script::default()).text();
        let arguments: Value = serde_json::from_str(&arguments).expect("JSON");
        assert_eq!(arguments, json!({"city": "demo", "unit": "celsius"}));
    }

    #[test]
    fn schemas_may_refer_to_themselves() {
        let schema = json!({
            "$defs": {"node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}}},
            "type": "object",
            "properties": {
                "head": {"$ref": "#/$defs/node"},
                "sizes": {"type": ["array", "null"], "items": {"type": "integer", "minimum": 4}},
                "maybe": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
            },
        });
        let value = sample(&schema, &schema, 0);
        assert_eq!(
            (&value["sizes"], &value["maybe"]),
            (&json!([4]), &json!(true))
        );
        assert!(value["head"]["next"].is_object());
    }

    #[test]
    fn every_dialects_tool_choice() {
        let named = ToolChoice::Named("f".into());
        for (value, choice) in [
            (json!(null), ToolChoice::Auto),
            (json!("auto"), ToolChoice::Auto),
            (json!("none"), ToolChoice::Never),
            (json!("required"), ToolChoice::Any),
            (json!({"type": "any"}), ToolChoice::Any),
            (json!({"type": "none"}), ToolChoice::Never),
            (
                json!({"type": "tool", "name": "f"}),
                ToolChoice::Named("f".into()),
            ),
            (
                json!({"type": "function", "function": {"name": "f"}}),
                named,
            ),
        ] {
            assert_eq!(ToolChoice::of(&value), choice, "{value}");
        }
    }
}
