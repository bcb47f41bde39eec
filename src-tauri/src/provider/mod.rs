//! What a provider is while Traygate runs: its settings made ready, its clients, its pool and
//! its breakers.

pub mod clients;
pub mod demo;
pub mod recovery;
pub mod state;

use std::collections::HashMap;
use std::sync::{Arc, PoisonError, RwLock};

use http::HeaderValue;
use url::Url;

use self::clients::Clients;
use self::state::ProviderState;
use crate::policy::routing::{Base, Dialect};
use crate::policy::usage::Flavour;
use crate::settings::{ProviderKind, ProviderSettings};

/// One provider. Settings that change make a new one around the same [`ProviderState`].
pub struct Provider {
    pub settings: ProviderSettings,
    pub base: Base,
    /// Its name as a header value.
    pub label: HeaderValue,
    /// What its answers' counts mean, where they do not say it themselves.
    pub flavour: Flavour,
    pub clients: Arc<Clients>,
    pub state: Arc<ProviderState>,
    /// The upstream addresses of the few paths that most calls have: parsing one costs as much as
    /// hashing a small body. std RwLock: never held across an await.
    addresses: RwLock<HashMap<Box<str>, Url>>,
}

/// Paths whose addresses are kept.
const KEPT_ADDRESSES: usize = 32;

impl Provider {
    pub fn new(settings: ProviderSettings) -> Provider {
        let state = Arc::new(ProviderState::new(&settings));
        let clients = Arc::new(Clients::new(&settings));
        Provider::of(settings, state, clients)
    }

    /// The same provider with changed settings: calls share its pool and breakers, and its
    /// connections too where they are made as before.
    pub fn with(&self, settings: ProviderSettings) -> Provider {
        let clients = match self.clients.serve(&settings) {
            true => self.clients.clone(),
            false => Arc::new(Clients::new(&settings)),
        };
        Provider::of(settings, self.state.clone(), clients)
    }

    fn of(
        settings: ProviderSettings,
        state: Arc<ProviderState>,
        clients: Arc<Clients>,
    ) -> Provider {
        Provider {
            base: Base::new(&settings.base_url),
            label: HeaderValue::from_str(&settings.name)
                .unwrap_or_else(|_| HeaderValue::from_static("provider")),
            flavour: settings
                .base_url
                .host_str()
                .map_or(Flavour::Plain, Flavour::of),
            clients,
            state,
            addresses: RwLock::default(),
            settings,
        }
    }

    pub fn name(&self) -> &Arc<str> {
        &self.settings.name
    }

    /// The upstream address of a client's path and query; `is_known`: the path is one of few.
    ///
    /// # Errors
    /// Path and base make no URL.
    pub fn address(
        &self,
        path: &str,
        query: Option<&str>,
        is_known: bool,
    ) -> Result<Url, url::ParseError> {
        if !is_known || query.is_some() {
            return Url::parse(&self.base.join(path, query));
        }
        let kept = self
            .addresses
            .read()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some(address) = kept.get(path) {
            return Ok(address.clone());
        }
        drop(kept);
        let address = Url::parse(&self.base.join(path, None))?;
        let mut kept = self
            .addresses
            .write()
            .unwrap_or_else(PoisonError::into_inner);
        if kept.len() < KEPT_ADDRESSES {
            kept.insert(path.into(), address.clone());
        }
        Ok(address)
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
