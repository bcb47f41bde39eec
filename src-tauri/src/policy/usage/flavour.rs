//! Which provider's habits an answer has, where the answer itself does not tell.

/// A provider known by its host. Everything that an answer tells by what it carries is read from
/// the answer, so that a gateway in front of a provider changes nothing; this is for the rest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Flavour {
    /// Nothing beyond what the answer says.
    #[default]
    Plain,
    /// Reasoning is not in `completion_tokens`; decides where there is no `total_tokens`.
    /// Every streamed chunk has the usage so far.
    Xai,
    /// Thinking is in `total_tokens` only.
    Gemini,
    /// Says nothing of `stream_options` but a 422, and sends usage in its last chunk anyway.
    Mistral,
    /// Sends usage in every stream, asked or not.
    OpenRouter,
}

impl Flavour {
    /// By the host name of a provider's address, without its port.
    pub fn of(host: &str) -> Self {
        let host = host.trim_end_matches('.').to_ascii_lowercase();
        let within = |domain: &str| {
            host.strip_suffix(domain)
                .is_some_and(|before| before.is_empty() || before.ends_with('.'))
        };
        if within("x.ai") {
            Self::Xai
        } else if within("googleapis.com") {
            Self::Gemini
        } else if within("mistral.ai") {
            Self::Mistral
        } else if within("openrouter.ai") {
            Self::OpenRouter
        } else {
            Self::Plain
        }
    }

    /// A stream has no usage unless the request asks for it (`stream_options.include_usage`).
    ///
    /// The others' documentation says that usage always comes: OpenRouter, *Usage accounting*
    /// (the option has no effect); Mistral, *Chat completion* (in the last chunk; the option is
    /// refused as an extra input); xAI, *Chat completions* (in every chunk).
    pub fn has_to_be_asked(self) -> bool {
        match self {
            Self::Plain | Self::Gemini => true,
            Self::Xai | Self::Mistral | Self::OpenRouter => false,
        }
    }
}
