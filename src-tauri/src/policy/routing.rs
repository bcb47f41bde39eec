//! Decides which provider, route and upstream address a request has.

use std::borrow::Cow;

use url::Url;

/// The shape of a route's bodies and errors. It follows the path, not the provider.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Dialect {
    OpenAi,
    Anthropic,
    Ollama,
}

/// What a path asks for, as far as Traygate treats it apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Route {
    ChatCompletions,
    Completions,
    Responses,
    ResponsesCompact,
    Embeddings,
    Messages,
    /// llama.cpp's own `/completion`.
    LlamaCompletion,
    OllamaChat,
    OllamaGenerate,
    OllamaEmbed,
    /// A POST that costs nothing (`count_tokens`, telemetry, Ollama's `show` and kin), or any
    /// method but POST: passes straight.
    Free,
    /// A POST nobody here knows: pooled and guarded, never merged.
    UnknownPost,
}

impl Route {
    /// The route of a request whose provider prefix has been taken off its path.
    pub fn of(method: &http::Method, path: &str) -> Route {
        if *method != http::Method::POST {
            return Route::Free;
        }
        let path = path.trim_matches('/');
        if let Some(ollama) = path
            .strip_prefix("api/")
            .filter(|rest| is_ollama_path(rest))
        {
            return match ollama {
                "chat" => Route::OllamaChat,
                "generate" => Route::OllamaGenerate,
                "embed" | "embeddings" => Route::OllamaEmbed,
                _ => Route::Free,
            };
        }
        let bare = match path.split_once('/') {
            Some((first, rest)) if is_version(first) => rest,
            _ => path,
        };
        // Anthropic's `messages` only at the top: OpenAI's `threads/{id}/messages` is another thing.
        match bare {
            "messages" => return Route::Messages,
            "completion" => return Route::LlamaCompletion,
            _ if is_free_post(bare) => return Route::Free,
            _ => {}
        }
        // By its end, since Azure puts `openai/deployments/{name}/` before the route.
        let ends_with = |route: &str| {
            bare.strip_suffix(route)
                .is_some_and(|before| before.is_empty() || before.ends_with('/'))
        };
        if ends_with("chat/completions") {
            Route::ChatCompletions
        } else if ends_with("completions") {
            Route::Completions
        } else if ends_with("responses/compact") {
            Route::ResponsesCompact
        } else if ends_with("responses") {
            Route::Responses
        } else if ends_with("embeddings") {
            Route::Embeddings
        } else {
            Route::UnknownPost
        }
    }

    /// True for the routes known by name: they are merged and their usage is read.
    pub fn is_generation(self) -> bool {
        !matches!(self, Route::Free | Route::UnknownPost)
    }

    /// True where a call takes a permit and passes the breaker.
    pub fn is_guarded(self) -> bool {
        self != Route::Free
    }

    /// True where an answer streams unless the body says `"stream": false`.
    pub fn streams_by_default(self) -> bool {
        matches!(self, Route::OllamaChat | Route::OllamaGenerate)
    }

    /// The route's name in the log; `None` for those that are named by their own path.
    pub fn name(self) -> Option<&'static str> {
        Some(match self {
            Route::ChatCompletions => "chat/completions",
            Route::Completions => "completions",
            Route::Responses => "responses",
            Route::ResponsesCompact => "responses/compact",
            Route::Embeddings => "embeddings",
            Route::Messages => "messages",
            Route::LlamaCompletion => "completion",
            Route::OllamaChat => "api/chat",
            Route::OllamaGenerate => "api/generate",
            Route::OllamaEmbed => "api/embed",
            Route::Free | Route::UnknownPost => return None,
        })
    }
}

impl Dialect {
    /// The dialect a path speaks, where the path alone tells.
    pub fn of_path(path: &str) -> Option<Dialect> {
        let path = path.trim_matches('/');
        if path.strip_prefix("api/").is_some_and(is_ollama_path) {
            return Some(Dialect::Ollama);
        }
        let bare = match path.split_once('/') {
            Some((first, rest)) if is_version(first) => rest,
            _ => path,
        };
        if bare == "messages" || bare.starts_with("messages/") {
            return Some(Dialect::Anthropic);
        }
        ["completions", "responses", "embeddings", "completion"]
            .iter()
            .any(|route| bare.split('/').any(|segment| segment == *route))
            .then_some(Dialect::OpenAi)
    }
}

/// Ollama's native paths, without their `api/`.
/// Source: Ollama's API documentation (`docs/api.md`).
fn is_ollama_path(rest: &str) -> bool {
    matches!(
        rest,
        "chat"
            | "generate"
            | "embed"
            | "embeddings"
            | "tags"
            | "show"
            | "create"
            | "copy"
            | "delete"
            | "pull"
            | "push"
            | "ps"
            | "version"
    ) || rest.starts_with("blobs/")
}

/// POSTs that no provider charges for: they pass straight.
fn is_free_post(bare: &str) -> bool {
    matches!(
        bare,
        "messages/count_tokens"
            | "responses/input_tokens"
            | "api/event_logging/batch"
            | "api/hello"
            | "tokenize"
            | "detokenize"
            | "apply-template"
    ) || bare.ends_with("/cancel")
}

/// `v1`, `v1beta`, `v4`: a path segment that names an API version.
pub fn is_version(segment: &str) -> bool {
    let Some(rest) = segment.strip_prefix('v') else {
        return false;
    };
    rest.starts_with(|c: char| c.is_ascii_digit())
        && rest.chars().all(|c| c.is_ascii_alphanumeric())
}

/// What the prefixes of a client's path say, and what is left for the provider.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Address<'a> {
    /// From `/t/{token}/`.
    pub token: Option<&'a str>,
    /// From `/@name/`.
    pub tool: Option<&'a str>,
    /// From `/{provider}/`; `None` on a bare path.
    pub provider: Option<&'a str>,
    /// The rest; begins with `/` or is empty.
    pub path: &'a str,
}

/// `/{word}/v1/…` names a provider that is not there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnknownProvider(pub String);

/// Takes `/t/{token}`, `/@name` and `/{provider}` off a path.
///
/// # Errors
/// [`UnknownProvider`] where the first word stands before a version segment and is no provider.
pub fn read_address(
    path: &str,
    is_provider: impl Fn(&str) -> bool,
) -> Result<Address<'_>, UnknownProvider> {
    let mut rest = path;
    let mut token = None;
    if let Some(after) = rest.strip_prefix("/t/") {
        let (word, tail) = split_segment(after);
        token = Some(word);
        rest = tail;
    }
    let mut tool = None;
    if let Some(after) = rest.strip_prefix("/@") {
        let (word, tail) = split_segment(after);
        tool = Some(word);
        rest = tail;
    }
    let mut address = Address {
        token,
        tool,
        provider: None,
        path: rest,
    };
    if let Some(after) = rest.strip_prefix('/') {
        let (word, tail) = split_segment(after);
        if is_provider(word) {
            address.provider = Some(word);
            address.path = tail;
        } else if !word.is_empty()
            && !is_version(word)
            && tail
                .strip_prefix('/')
                .is_some_and(|next| is_version(split_segment(next).0))
        {
            return Err(UnknownProvider(word.to_owned()));
        }
    }
    Ok(address)
}

/// Splits `a/b/c` into `a` and `/b/c`.
fn split_segment(path: &str) -> (&str, &str) {
    path.split_at(path.find('/').unwrap_or(path.len()))
}

/// The dialect whose default provider a bare path goes to.
pub fn bare_dialect(path: &str, has_anthropic_version: bool) -> Dialect {
    match Dialect::of_path(path) {
        Some(Dialect::Ollama) => Dialect::Ollama,
        Some(Dialect::Anthropic) => Dialect::Anthropic,
        _ if has_anthropic_version => Dialect::Anthropic,
        _ => Dialect::OpenAi,
    }
}

/// A provider's base URL, taken apart once so that joining is cheap.
#[derive(Clone, Debug)]
pub struct Base {
    /// Scheme, host and port: `https://api.openai.com`.
    origin: String,
    /// The base's path without its closing `/`; empty for the root.
    path: String,
    /// The base's own query, without `?`.
    query: Option<String>,
    has_version: bool,
}

impl Base {
    pub fn new(url: &Url) -> Base {
        let path = url.path().trim_end_matches('/').to_owned();
        Base {
            origin: url.origin().ascii_serialization(),
            has_version: path.split('/').any(is_version),
            path,
            query: url.query().map(str::to_owned),
        }
    }

    /// Scheme, host and port: what a stored key is bound to.
    pub fn origin(&self) -> &str {
        &self.origin
    }

    /// The upstream address of a client's path and query.
    ///
    /// The base's path is followed by the client's; a leading `/v1` of the client's is left out
    /// if the base's path has a version segment. No slash is doubled at the seam; of the two
    /// queries the client's wins, name by name.
    pub fn join(&self, path: &str, query: Option<&str>) -> String {
        let mut tail = path.trim_start_matches('/');
        if self.has_version {
            tail = match tail.strip_prefix("v1") {
                Some("") => "",
                Some(rest) if rest.starts_with('/') => rest.trim_start_matches('/'),
                _ => tail,
            };
        }
        let mut address = String::with_capacity(
            self.origin.len() + self.path.len() + tail.len() + query.map_or(0, str::len) + 2,
        );
        address.push_str(&self.origin);
        address.push_str(&self.path);
        if !tail.is_empty() || self.path.is_empty() {
            address.push('/');
            address.push_str(tail);
        }
        if let Some(query) = merge_queries(self.query.as_deref(), query) {
            address.push('?');
            address.push_str(&query);
        }
        address
    }
}

/// The base's parameters that the client does not name, then the client's as they came.
fn merge_queries<'a>(base: Option<&'a str>, client: Option<&'a str>) -> Option<Cow<'a, str>> {
    let (base, client) = match (base, client) {
        (None, query) | (query, None) => return query.map(Cow::Borrowed),
        (Some(base), Some(client)) => (base, client),
    };
    let name = |pair: &'a str| pair.split('=').next().unwrap_or(pair);
    let mut merged: Vec<&str> = base
        .split('&')
        .filter(|pair| !client.split('&').any(|own| name(own) == name(pair)))
        .collect();
    merged.push(client);
    Some(Cow::Owned(merged.join("&")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::Method;

    #[test]
    fn joins_every_base_with_every_client_path() {
        let table = [
            // base, client path, address
            (
                "https://h",
                "/v1/chat/completions",
                "https://h/v1/chat/completions",
            ),
            (
                "https://h",
                "/chat/completions",
                "https://h/chat/completions",
            ),
            ("https://h/", "/v1/models", "https://h/v1/models"),
            ("https://h/", "/", "https://h/"),
            ("https://h", "", "https://h/"),
            (
                "https://h/v1",
                "/v1/chat/completions",
                "https://h/v1/chat/completions",
            ),
            (
                "https://h/v1",
                "/chat/completions",
                "https://h/v1/chat/completions",
            ),
            ("https://h/v1/", "/v1/models", "https://h/v1/models"),
            ("https://h/v1/", "/v1", "https://h/v1"),
            (
                "https://h/v1",
                "//chat/completions",
                "https://h/v1/chat/completions",
            ),
            (
                "https://h/api/v3",
                "/v1/chat/completions",
                "https://h/api/v3/chat/completions",
            ),
            ("https://h/api/v3", "/v1beta/x", "https://h/api/v3/v1beta/x"),
            (
                "https://h/v1beta/openai",
                "/v1/models",
                "https://h/v1beta/openai/models",
            ),
            (
                "https://h/v1beta/openai",
                "/models",
                "https://h/v1beta/openai/models",
            ),
            (
                "https://h/openai/deployments/d",
                "/chat/completions",
                "https://h/openai/deployments/d/chat/completions",
            ),
            (
                "https://h/openai/deployments/d",
                "/v1/chat/completions",
                "https://h/openai/deployments/d/v1/chat/completions",
            ),
            ("http://h:11434", "/api/chat", "http://h:11434/api/chat"),
            (
                "https://h/v1",
                "/v1/models/a%2Fb",
                "https://h/v1/models/a%2Fb",
            ),
            ("https://h/v1", "/v1x/y", "https://h/v1/v1x/y"),
            ("https://[::1]:8443/v1", "/v1/x", "https://[::1]:8443/v1/x"),
            (
                "https://h/o?api-version=1&a=b",
                "/x?api-version=2",
                "https://h/o/x?a=b&api-version=2",
            ),
            (
                "https://h/o?api-version=1",
                "/x",
                "https://h/o/x?api-version=1",
            ),
            (
                "https://h/v1",
                "/v1/models?client_version=0.1",
                "https://h/v1/models?client_version=0.1",
            ),
        ];
        for (base, client, address) in table {
            let (path, query) = match client.split_once('?') {
                Some((path, query)) => (path, Some(query)),
                None => (client, None),
            };
            let joined = Base::new(&Url::parse(base).unwrap()).join(path, query);
            assert_eq!(joined, address, "{base} × {client}");
        }
    }

    #[test]
    fn reads_prefixes() {
        let known = |name: &str| matches!(name, "openai" | "ollama");
        let read = |path| read_address(path, known);
        let plain = |path| Address {
            token: None,
            tool: None,
            provider: None,
            path,
        };
        assert_eq!(
            read("/v1/chat/completions"),
            Ok(plain("/v1/chat/completions"))
        );
        assert_eq!(read("/api/chat"), Ok(plain("/api/chat")));
        assert_eq!(read("/chat/completions"), Ok(plain("/chat/completions")));
        assert_eq!(read("/"), Ok(plain("/")));
        assert_eq!(
            read("/ollama/v1/models"),
            Ok(Address {
                provider: Some("ollama"),
                ..plain("/v1/models")
            })
        );
        assert_eq!(
            read("/ollama"),
            Ok(Address {
                provider: Some("ollama"),
                ..plain("")
            })
        );
        assert_eq!(
            read("/t/secret/@aider/openai/v1/models"),
            Ok(Address {
                token: Some("secret"),
                tool: Some("aider"),
                provider: Some("openai"),
                path: "/v1/models"
            })
        );
        assert_eq!(
            read("/@aider/v1/models"),
            Ok(Address {
                tool: Some("aider"),
                ..plain("/v1/models")
            })
        );
        assert_eq!(read("/grok/v1/models"), Err(UnknownProvider("grok".into())));
        assert_eq!(read("/v1/v1/models"), Ok(plain("/v1/v1/models")));
    }

    #[test]
    fn names_routes_by_path() {
        let post = |path| Route::of(&Method::POST, path);
        let table = [
            ("/v1/chat/completions", Route::ChatCompletions),
            ("/chat/completions", Route::ChatCompletions),
            ("/v1/chat/completions/", Route::ChatCompletions),
            (
                "/openai/deployments/d/chat/completions",
                Route::ChatCompletions,
            ),
            ("/v1/completions", Route::Completions),
            ("/v1/responses", Route::Responses),
            ("/responses", Route::Responses),
            ("/v1/responses/compact", Route::ResponsesCompact),
            ("/v1/responses/resp_1/cancel", Route::Free),
            ("/v1/embeddings", Route::Embeddings),
            ("/v1/messages", Route::Messages),
            ("/messages", Route::Messages),
            ("/v1/messages/count_tokens", Route::Free),
            ("/v1/messages/batches", Route::UnknownPost),
            ("/v1/threads/t/messages", Route::UnknownPost),
            ("/completion", Route::LlamaCompletion),
            ("/api/chat", Route::OllamaChat),
            ("/api/generate", Route::OllamaGenerate),
            ("/api/embed", Route::OllamaEmbed),
            ("/api/show", Route::Free),
            ("/api/blobs/sha256:1", Route::Free),
            ("/api/event_logging/batch", Route::Free),
            ("/v1/audio/speech", Route::UnknownPost),
            ("/v1/mycompletions", Route::UnknownPost),
        ];
        for (path, route) in table {
            assert_eq!(post(path), route, "{path}");
        }
        assert_eq!(Route::of(&Method::GET, "/v1/chat/completions"), Route::Free);
    }

    #[test]
    fn dialect_follows_the_path() {
        let table = [
            ("/v1/messages", Some(Dialect::Anthropic)),
            ("/v1/messages/count_tokens", Some(Dialect::Anthropic)),
            ("/v1/threads/t/messages", None),
            ("/api/chat", Some(Dialect::Ollama)),
            ("/api/tags", Some(Dialect::Ollama)),
            ("/v1/chat/completions", Some(Dialect::OpenAi)),
            ("/v1/models", None),
        ];
        for (path, dialect) in table {
            assert_eq!(Dialect::of_path(path), dialect, "{path}");
        }
        assert_eq!(bare_dialect("/v1/models", true), Dialect::Anthropic);
        assert_eq!(bare_dialect("/v1/models", false), Dialect::OpenAi);
        assert_eq!(bare_dialect("/v1/messages", false), Dialect::Anthropic);
        assert_eq!(bare_dialect("/api/tags", false), Dialect::Ollama);
    }
}
