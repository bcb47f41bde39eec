//! Finds the price of a model at a provider, or that nobody knows it.
//!
//! A price is never guessed: a model whose version is not in the list is unpriced, not priced as
//! its predecessor, and an unpriced call is never one that cost nothing.

mod data;
mod model_name;
mod rates;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, PoisonError, RwLock};

use url::Url;

use self::data::Seller;
use self::model_name::{spellings, unrouted};
use crate::clock::WallTime;
use crate::policy::money::Nanodollars;
use crate::settings::{PriceRule, ProviderKind};

pub use self::data::{CURRENT_LIST, Model, PriceData, PriceDataError};
pub use self::rates::{Rates, Scale, Step, Tokens};

/// Models come from clients, who may name a new one in each call.
const MOST_FOUND: usize = 4096;

/// What a provider is, as far as its prices go.
#[derive(Clone, Copy, Debug)]
pub struct Provider<'a> {
    /// As the settings call it.
    pub name: &'a str,
    /// What it speaks.
    pub kind: ProviderKind,
    /// Where it is.
    pub base_url: &'a Url,
    /// Whether it runs on this machine, and costs nothing.
    pub local: bool,
}

/// What is known about the price of a model.
#[derive(Clone, Debug)]
pub enum Price {
    /// It costs nothing: it runs here, or is offered free.
    Free,
    /// The person set it.
    Own {
        /// For all times and tiers.
        rates: Arc<Rates>,
        /// The tokens that fit into the model, where the list says so.
        context_window: Option<u64>,
    },
    /// The list has it.
    Listed(Arc<Model>),
    /// Nobody knows it.
    Unpriced,
}

impl Price {
    /// The prices at a time, in the service tier that is named. `None` if unpriced.
    pub fn rates(&self, at: WallTime, tier: Option<&str>) -> Option<Arc<Rates>> {
        static NOTHING: LazyLock<Arc<Rates>> = LazyLock::new(Arc::default);
        match self {
            Self::Free => Some(Arc::clone(&NOTHING)),
            Self::Own { rates, .. } => Some(Arc::clone(rates)),
            Self::Listed(model) => model.rates(at, tier),
            Self::Unpriced => None,
        }
    }

    /// The tokens that fit into the model, where that is known.
    pub fn context_window(&self) -> Option<u64> {
        match self {
            Self::Listed(model) => model.context_window(),
            Self::Own { context_window, .. } => *context_window,
            Self::Free | Self::Unpriced => None,
        }
    }
}

/// The prices of one provider's models, by their names.
type Models = HashMap<Box<str>, Price>;

/// What a person's own price comes to. What it does not name pays as fresh input does.
fn own_rates(rule: &PriceRule) -> Rates {
    let flat = |price: Option<Nanodollars>| price.map(Scale::flat);
    let plain = Rates::plain(rule.input, rule.output);
    let cache_write_5m = flat(rule.cache_write).unwrap_or(plain.cache_write_5m);
    Rates {
        cached_input: flat(rule.cached_input).unwrap_or(plain.cached_input),
        cache_write_1h: flat(rule.cache_write_1h).unwrap_or_else(|| cache_write_5m.clone()),
        cache_write_5m,
        ..plain
    }
}

/// All prices in force: a list, and the person's own on top.
///
/// New data or settings make a new one, to be put in the place of the old; what was found is
/// remembered within.
#[derive(Debug)]
pub struct Prices {
    data: Arc<PriceData>,
    own: Vec<(PriceRule, Arc<Rates>)>,
    /// By provider, then by model.
    found: RwLock<HashMap<Box<str>, Models>>,
}

impl Prices {
    /// The prices of a list, with the person's own in their order; the first that matches wins.
    pub fn new(data: Arc<PriceData>, own: &[PriceRule]) -> Self {
        let own = own.iter();
        Self {
            data,
            own: own
                .map(|rule| (rule.clone(), Arc::new(own_rates(rule))))
                .collect(),
            found: RwLock::default(),
        }
    }

    /// The list that these come from.
    pub fn data(&self) -> &Arc<PriceData> {
        &self.data
    }

    /// The price of a model at a provider. A provider is known by its name: where its address
    /// changes, make new [`Prices`].
    pub fn price(&self, provider: Provider<'_>, model: &str) -> Price {
        if provider.local {
            return Price::Free;
        }
        // What a panic left half done is a missing entry at worst.
        let found = self.found.read().unwrap_or_else(PoisonError::into_inner);
        if let Some(price) = found
            .get(provider.name)
            .and_then(|models| models.get(model))
        {
            return price.clone();
        }
        drop(found);
        let price = self.look_up(provider, model);
        let mut found = self.found.write().unwrap_or_else(PoisonError::into_inner);
        if found.values().map(HashMap::len).sum::<usize>() >= MOST_FOUND {
            found.clear();
        }
        let models = found.entry(provider.name.into()).or_default();
        models.insert(model.into(), price.clone());
        price
    }

    fn look_up(&self, provider: Provider<'_>, model: &str) -> Price {
        let listed = self.listed(provider, model);
        match self.own.iter().find(|(rule, _)| rule.model.matches(model)) {
            Some((_, rates)) => Price::Own {
                rates: Arc::clone(rates),
                context_window: listed.context_window(),
            },
            None => listed,
        }
    }

    /// What the list says.
    fn listed(&self, provider: Provider<'_>, model: &str) -> Price {
        let name = model.to_lowercase();
        let Some((seller, name)) = self.seller(provider, &name) else {
            return Price::Unpriced;
        };
        let routed = seller.id() == "openrouter";
        let name = if routed { unrouted(name) } else { name };
        let own_prefix = self.own_prefix(seller, name);
        let found = [Some(name), own_prefix]
            .into_iter()
            .flatten()
            .flat_map(spellings)
            .find_map(|name| self.data.model(seller, &name));
        match found {
            Some(model) => Price::Listed(model),
            // OpenRouter's word for what it offers free, whichever model it is.
            None if routed && name.ends_with(":free") => Price::Free,
            None => Price::Unpriced,
        }
    }

    /// Who sells at a provider, and what the model is called there. Its address says so best,
    /// then its name, then the model's own prefix; last what it speaks, since a gateway's
    /// `claude-…` and `gpt-…` are the makers' own wherever they are.
    fn seller<'n>(&self, provider: Provider<'_>, name: &'n str) -> Option<(&Seller, &'n str)> {
        // A Codex login's address, which the list does not know.
        if provider.base_url.host_str() == Some("chatgpt.com") {
            return Some((self.data.seller_called("openai")?, name));
        }
        if let Some(seller) = self.data.seller_at(provider.base_url.as_str()) {
            return Some((seller, name));
        }
        if let Some(seller) = self.data.seller_called(&provider.name.to_lowercase()) {
            return Some((seller, name));
        }
        if let Some((maker, model)) = name.split_once('/') {
            return Some((self.data.seller_called(maker)?, model));
        }
        let maker = match provider.kind {
            ProviderKind::Anthropic => "anthropic",
            // Its open weights are served by anybody, at any price.
            ProviderKind::OpenAi if !name.starts_with("gpt-oss") => "openai",
            _ => return None,
        };
        Some((self.data.seller_called(maker)?, name))
    }

    /// A model without a prefix that only repeats where it is: Gemini's `models/gemini-…`,
    /// `openai/gpt-…` sent to OpenAI itself.
    fn own_prefix<'n>(&self, seller: &Seller, name: &'n str) -> Option<&'n str> {
        let (prefix, model) = name.split_once('/')?;
        let same = |other: &Seller| other.id() == seller.id();
        (prefix == "models" || self.data.seller_called(prefix).is_some_and(same)).then_some(model)
    }
}
