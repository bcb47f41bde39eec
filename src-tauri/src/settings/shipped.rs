//! The providers that Traygate comes with.

use std::sync::Arc;

use url::Url;

use super::{InForce, KeySource, Limits, ProviderKind, ProviderSettings};
use crate::policy::breaker::BreakerSettings;

/// Where a demo is before it listens. Port 0 cannot be called: it fails at once.
const DEMO_PLACEHOLDER: &str = "http://127.0.0.1:0";

/// The address of a demo that the file adds.
pub(super) fn demo_placeholder() -> Url {
    address(DEMO_PLACEHOLDER)
}

/// All of them, held to the limits of a provider about which nothing is said.
pub(super) fn shipped(limits: &Limits, breaker: &BreakerSettings) -> Vec<ProviderSettings> {
    use ProviderKind::{Anthropic, Demo, LlamaCpp, Ollama, OpenAi};
    let remote = |name: &str, kind, base_url| {
        let mut provider = blank(name, kind, address(base_url), limits, breaker);
        provider.shipped = true;
        provider
    };
    let local = |name: &str, kind, base_url| ProviderSettings {
        local: true,
        ..remote(name, kind, base_url)
    };
    vec![
        ProviderSettings {
            default: true,
            ..remote("openai", OpenAi, "https://api.openai.com/v1")
        },
        ProviderSettings {
            default: true,
            ..remote("anthropic", Anthropic, "https://api.anthropic.com")
        },
        ProviderSettings {
            // Codex's login: a subscription's token, which no stored key can replace.
            key: KeySource::Pass,
            ..remote("chatgpt", OpenAi, "https://chatgpt.com/backend-api/codex")
        },
        remote("openrouter", OpenAi, "https://openrouter.ai/api/v1"),
        // `localhost`: they differ in the family they listen on, and both are tried.
        local("ollama", Ollama, "http://localhost:11434"),
        local("llama-cpp", LlamaCpp, "http://localhost:8080"),
        // Without `/v1`, so that its own `/api/v0` is reached too.
        local("lm-studio", OpenAi, "http://localhost:1234"),
        ProviderSettings {
            key: KeySource::None,
            ..local("demo", Demo, DEMO_PLACEHOLDER)
        },
    ]
}

/// A provider about which nothing but these is known.
pub(super) fn blank(
    name: &str,
    kind: ProviderKind,
    base_url: Url,
    limits: &Limits,
    breaker: &BreakerSettings,
) -> ProviderSettings {
    ProviderSettings {
        name: Arc::from(name),
        kind,
        base_url,
        key: KeySource::Auto,
        default: false,
        local: false,
        shipped: false,
        limits: limits.clone(),
        breaker: breaker.clone(),
        in_force: InForce::default(),
        auth_header: None,
        headers: Vec::new(),
        ca_file: None,
        ask_usage: asks_usage(kind),
    }
}

/// Whether a chat stream is asked for its tokens: Anthropic's own dialect always says them, and
/// what it makes of OpenAI's is not known.
pub(super) fn asks_usage(kind: ProviderKind) -> bool {
    kind != ProviderKind::Anthropic
}

fn address(text: &str) -> Url {
    Url::parse(text).expect("the addresses of this file parse, as the tests show")
}
