//! Names the tool that calls: from the path, else its tag, else its User-Agent.

use std::sync::Arc;

use http::header::{HeaderMap, HeaderName, USER_AGENT};

const TAG: HeaderName = HeaderName::from_static("x-traygate-tag");
/// Bytes of a tool's name.
const TOOL_BYTES: usize = 64;

/// The tool that the path names.
pub fn tool_in_path(name: &str) -> Option<Arc<str>> {
    let name = clean_name(name.trim());
    (!name.is_empty()).then(|| name.into())
}

/// The tool that calls, as far as the headers tell: by its tag, else by its User-Agent.
pub fn tool_name(headers: &HeaderMap) -> Arc<str> {
    let tag = headers.get(TAG).and_then(|tag| tag.to_str().ok());
    if let Some(name) = tag.map(str::trim).filter(|name| !name.is_empty()) {
        return clean_name(name).into();
    }
    let agent = headers
        .get(USER_AGENT)
        .and_then(|agent| agent.to_str().ok());
    match agent.map(str::trim) {
        Some(agent) if !agent.is_empty() => tool_of_agent(agent).into(),
        _ => "unknown".into(),
    }
}

fn clean_name(name: &str) -> String {
    let is_plain = |byte: u8| matches!(byte, b' '..=b'~');
    if name.len() <= TOOL_BYTES && name.bytes().all(is_plain) {
        return name.to_owned();
    }
    let is_fine = |c: &char| !c.is_control();
    let mut clean = String::new();
    for c in name.chars().filter(is_fine) {
        if clean.len() + c.len_utf8() > TOOL_BYTES {
            break;
        }
        clean.push(c);
    }
    clean
}

/// `claude-cli/2.0.77 (external, cli)` is `claude-code`, `OpenAI/JS 4.104.0` is `openai-js`.
fn tool_of_agent(agent: &str) -> String {
    let product = agent.split_whitespace().next().unwrap_or(agent);
    let (name, version) = product.split_once('/').unwrap_or((product, ""));
    let name = name.to_ascii_lowercase();
    let name = match name.as_str() {
        "claude-cli" => "claude-code",
        "mozilla" => "browser",
        name if name.starts_with("codex") => "codex",
        // The Python SDKs' asynchronous clients are the same tool.
        name => name
            .strip_prefix("async")
            .filter(|rest| !rest.is_empty())
            .unwrap_or(name),
    };
    // The official SDKs name their language where others put a version.
    let is_language = version.starts_with(|c: char| c.is_ascii_alphabetic());
    if is_language && matches!(name, "openai" | "anthropic") {
        clean_name(&format!("{name}-{}", version.to_ascii_lowercase()))
    } else {
        clean_name(name)
    }
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    #[test]
    fn names_tools() {
        let table = [
            ("OpenAI/JS 4.104.0", "openai-js"),
            ("AsyncOpenAI/Python 1.99.0", "openai-python"),
            ("Anthropic/JS 0.60.0", "anthropic-js"),
            ("claude-cli/2.0.77 (external, cli)", "claude-code"),
            ("codex_exec/0.171.0 (Debian 12; x86_64)", "codex"),
            ("curl/7.88.1", "curl"),
            ("python-httpx/0.27.0", "python-httpx"),
            ("Mozilla/5.0 (X11)", "browser"),
            ("node", "node"),
        ];
        for (agent, tool) in table {
            let mut headers = HeaderMap::new();
            headers.insert(USER_AGENT, HeaderValue::from_static(agent));
            assert_eq!(&*tool_name(&headers), tool, "{agent}");
            headers.insert(TAG, HeaderValue::from_static("my-agent"));
            assert_eq!(&*tool_name(&headers), "my-agent");
        }
        assert_eq!(&*tool_name(&HeaderMap::new()), "unknown");
    }
}
