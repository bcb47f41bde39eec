//! What a provider is while Traygate runs: its settings made ready, its clients, its pool and
//! its breakers.

pub mod clients;
pub mod demo;
pub mod recovery;
pub mod state;

use std::sync::Arc;

use http::HeaderValue;

use self::clients::Clients;
use self::state::ProviderState;
use crate::policy::routing::{Base, Dialect};
use crate::settings::{ProviderKind, ProviderSettings};

/// One provider. Settings that change make a new one around the same [`ProviderState`].
pub struct Provider {
    pub settings: ProviderSettings,
    pub base: Base,
    /// Its name as a header value.
    pub label: HeaderValue,
    pub clients: Clients,
    pub state: Arc<ProviderState>,
}

impl Provider {
    pub fn new(settings: ProviderSettings) -> Provider {
        let state = Arc::new(ProviderState::new(&settings));
        Provider {
            base: Base::new(&settings.base_url),
            label: HeaderValue::from_str(&settings.name)
                .unwrap_or_else(|_| HeaderValue::from_static("provider")),
            clients: Clients::new(&settings),
            state,
            settings,
        }
    }

    pub fn name(&self) -> &Arc<str> {
        &self.settings.name
    }

    /// The dialect of paths that do not tell by themselves.
    pub fn dialect(&self) -> Dialect {
        match self.settings.kind {
            ProviderKind::Anthropic => Dialect::Anthropic,
            ProviderKind::Ollama => Dialect::Ollama,
            ProviderKind::OpenAi | ProviderKind::LlamaCpp | ProviderKind::Demo => Dialect::OpenAi,
        }
    }

    /// The free path whose answer shows that the provider is alive.
    pub fn model_list(&self) -> &'static str {
        match self.settings.kind {
            ProviderKind::Ollama => "/api/tags",
            _ => "/v1/models",
        }
    }
}
