//! Reads the price list of the genai-prices project: who sells what, by which names, for how much.
//!
//! The list is <https://github.com/pydantic/genai-prices> (MIT), in the form of its `v2` file. The
//! crate of that name reckons in floats and keeps its rates to itself, so only its data is used
//! here; a test holds every price of ours against the crate's own.

use std::borrow::Cow;
use std::collections::{HashMap, HashSet};
use std::fmt;
use std::sync::{Arc, LazyLock};

use fancy_regex::Regex;
use jiff::Timestamp;
use jiff::civil::Date;
use jiff::tz::TimeZone;
use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny, MapAccess, Visitor};
use serde_json::value::RawValue;

use super::model_name::version_goes_on;
use super::rates::{Rates, Scale, Step};
use crate::clock::WallTime;
use crate::policy::money::Nanodollars;

/// As published with version 0.2.1 of the crate.
const BUNDLED: &str = include_str!("genai-prices.json");

/// A million tokens cost less than this, in dollars; the dearest today cost 600.
const ABSURD: Nanodollars = Nanodollars(10_000 * 1_000_000_000);

/// Where the project publishes its list as it is today.
pub const CURRENT_LIST: &str =
    "https://raw.githubusercontent.com/pydantic/genai-prices/main/prices/new_data/v2/data.json";

const DAY_SECS: i64 = 86_400;

/// What is wrong with a price list.
#[derive(Debug, thiserror::Error)]
pub enum PriceDataError {
    /// It is not in the form that is known.
    #[error("the price list cannot be read: {0}")]
    Unreadable(#[from] serde_json::Error),
    /// It is, and makes no sense.
    #[error("the price list makes no sense: {0}")]
    Senseless(String),
}

/// A price list, whole and checked.
#[derive(Debug)]
pub struct PriceData {
    sellers: Vec<Seller>,
}

/// Somebody who sells models: a maker, a cloud, a router.
#[derive(Debug)]
pub(super) struct Seller {
    id: Box<str>,
    /// Matches the beginning of its API's address.
    address: Regex,
    /// Other names it goes by.
    alias: Option<Rule>,
    /// Whose models it sells at their price.
    fallbacks: Vec<Box<str>>,
    models: Vec<Arc<Model>>,
}

impl Seller {
    pub(super) fn id(&self) -> &str {
        &self.id
    }
}

/// A model of one seller.
#[derive(Debug)]
pub struct Model {
    id: Box<str>,
    seller: Arc<str>,
    names: Rule,
    context_window: Option<u64>,
    /// The last that is in season holds. One of them always is.
    sheets: Vec<Priced>,
    /// What other service tiers change about it.
    tiers: Vec<TierSheet>,
}

#[derive(Debug)]
struct Priced {
    season: Option<Season>,
    sheet: Sheet,
    /// What the sheet comes to; `None` if it is not by the token.
    rates: Option<Arc<Rates>>,
}

#[derive(Debug)]
struct TierSheet {
    tier: Box<str>,
    season: Option<Season>,
    sheet: Sheet,
}

impl PriceData {
    /// The list that came with Traygate, read when it is first asked for.
    pub fn bundled() -> Arc<Self> {
        static READ: LazyLock<Arc<PriceData>> = LazyLock::new(|| {
            Arc::new(PriceData::from_json(BUNDLED).expect("the bundled list is sound, tests say"))
        });
        Arc::clone(&READ)
    }

    /// Reads a list: all of it, or none where anything in it is wrong.
    ///
    /// # Errors
    /// It is no JSON of the known form, a price is negative or absurd, a rule does not compile, a
    /// model has no price that always holds, a name comes twice, or it lists nobody.
    pub fn from_json(json: &str) -> Result<Self, PriceDataError> {
        let written: Vec<WrittenSeller<'_>> = serde_json::from_str(json)?;
        let mut ids = HashSet::new();
        let mut sellers = Vec::with_capacity(written.len());
        for seller in written {
            let seller = seller.check().map_err(PriceDataError::Senseless)?;
            if !ids.insert(seller.id.clone()) {
                return senseless(format!("{} comes twice", seller.id));
            }
            sellers.push(seller);
        }
        if sellers.iter().all(|seller| seller.models.is_empty()) {
            return senseless("it lists no model".to_owned());
        }
        Ok(Self { sellers })
    }

    /// Whether this list may take the place of `old`: it still has most of its models, and hardly
    /// any costs ten times more or less than before. A list in another unit, or cut short, fails.
    ///
    /// # Errors
    /// [`PriceDataError::Senseless`], with the figure that speaks against it.
    pub fn may_replace(&self, old: &PriceData) -> Result<(), PriceDataError> {
        let base = |model: &Model| {
            let input = model.sheets[0].sheet.input.as_ref();
            input.map(|scale| scale.base.0)
        };
        let now: HashMap<(&str, &str), &Model> = self
            .models()
            .map(|model| ((&*model.seller, &*model.id), model))
            .collect();
        let (mut all, mut kept, mut leapt) = (0_usize, 0_usize, 0_usize);
        for before in old.models() {
            all += 1;
            if let Some(after) = now.get(&(&*before.seller, &*before.id)) {
                kept += 1;
                if let (Some(before), Some(after)) = (base(before), base(after)) {
                    let (less, more) = (before.min(after), before.max(after));
                    leapt += usize::from(less > 0 && less.saturating_mul(10) <= more);
                }
            }
        }
        if kept * 2 < all {
            return senseless(format!("it has only {kept} of {all} known models"));
        }
        if leapt * 20 > kept {
            return senseless(format!("{leapt} of {kept} prices changed tenfold"));
        }
        Ok(())
    }

    /// How many models it lists.
    pub fn model_count(&self) -> usize {
        self.models().count()
    }

    fn models(&self) -> impl Iterator<Item = &Model> {
        self.sellers
            .iter()
            .flat_map(|seller| seller.models.iter().map(|model| &**model))
    }

    /// Who is at an address.
    pub(super) fn seller_at(&self, address: &str) -> Option<&Seller> {
        let found = |seller: &&Seller| seller.address.is_match(address).unwrap_or(false);
        self.sellers.iter().find(found)
    }

    /// Who has this name, in lower case, or goes by it.
    pub(super) fn seller_called(&self, name: &str) -> Option<&Seller> {
        let goes_by = |seller: &&Seller| {
            let alias = seller.alias.as_ref();
            alias.is_some_and(|alias| alias.matches(name, Reading::Loose))
        };
        let exactly = self.sellers.iter().find(|seller| *seller.id == *name);
        exactly.or_else(|| self.sellers.iter().find(goes_by))
    }

    /// The model that a seller sells under a name in lower case.
    pub(super) fn model(&self, seller: &Seller, name: &str) -> Option<Arc<Model>> {
        let sells = |seller: &Seller| {
            let mut models = seller.models.iter();
            models
                .find(|model| model.names.matches(name, Reading::Strict))
                .cloned()
        };
        sells(seller).or_else(|| {
            seller.fallbacks.iter().find_map(|id| {
                let other = self.sellers.iter().find(|seller| seller.id == *id)?;
                sells(other)
            })
        })
    }
}

fn senseless<T>(what: String) -> Result<T, PriceDataError> {
    Err(PriceDataError::Senseless(what))
}

impl Model {
    /// Its name in the list.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// Whose list it is in.
    pub fn seller(&self) -> &str {
        &self.seller
    }

    /// The tokens that fit into it, where the list says so.
    pub fn context_window(&self) -> Option<u64> {
        self.context_window
    }

    /// Its prices at a time, in the service tier that an answer named. A tier that is not listed
    /// has the standard prices. `None` if it is not sold by the token, or the list does not say
    /// for how much: an empty entry is a gap unless the name says `:free`.
    pub fn rates(&self, at: WallTime, tier: Option<&str>) -> Option<Arc<Rates>> {
        let in_season = |season: Option<Season>| season.is_none_or(|season| season.holds(at));
        let mut sheets = self.sheets.iter().rev();
        let standard = sheets.find(|priced| in_season(priced.season))?;
        let mut changed: Option<Sheet> = None;
        for other in &self.tiers {
            if tier == Some(&*other.tier) && in_season(other.season) {
                changed = Some(changed.unwrap_or_default().or(&other.sheet));
            }
        }
        match changed {
            None => standard.rates.clone(),
            Some(changed) => changed.or(&standard.sheet).rates(&self.id).map(Arc::new),
        }
    }

    /// The service tiers that have prices of their own at some time.
    pub fn tiers(&self) -> impl Iterator<Item = &str> {
        self.tiers.iter().map(|sheet| &*sheet.tier)
    }
}

/// When a price holds.
#[derive(Clone, Copy, Debug)]
enum Season {
    /// From this second of the Unix time on.
    From(i64),
    /// Between two seconds of the UTC day, over midnight if the end is before the start.
    Daily { start: i64, end: i64 },
}

impl Season {
    fn holds(self, at: WallTime) -> bool {
        let second = at.0.div_euclid(1_000_000);
        match self {
            Self::From(start) => second >= start,
            Self::Daily { start, end } => {
                let second = second.rem_euclid(DAY_SECS);
                if start <= end {
                    (start..end).contains(&second)
                } else {
                    second >= start || second < end
                }
            }
        }
    }
}

/// The prices of a model as they are written.
#[derive(Clone, Debug, Default)]
struct Sheet {
    input: Option<Scale>,
    cached_input: Option<Scale>,
    cache_write: Option<Scale>,
    cache_write_1h: Option<Scale>,
    output: Option<Scale>,
    reasoning: Option<Scale>,
    /// A thousand calls.
    calls: Option<Scale>,
    /// It also has prices for what no answer counts in tokens: hours, pages, searches.
    by_other_units: bool,
}

impl Sheet {
    /// This sheet, and `other` where this one says nothing.
    fn or(self, other: &Sheet) -> Self {
        let or = |this: Option<Scale>, other: &Option<Scale>| this.or_else(|| other.clone());
        Self {
            input: or(self.input, &other.input),
            cached_input: or(self.cached_input, &other.cached_input),
            cache_write: or(self.cache_write, &other.cache_write),
            cache_write_1h: or(self.cache_write_1h, &other.cache_write_1h),
            output: or(self.output, &other.output),
            reasoning: or(self.reasoning, &other.reasoning),
            calls: or(self.calls, &other.calls),
            by_other_units: self.by_other_units || other.by_other_units,
        }
    }

    /// What it comes to, for a model of this name; `None` if it is not by the token. A class
    /// without a price of its own is billed as the wider class that it is part of.
    fn rates(&self, model: &str) -> Option<Rates> {
        let by_the_token = self.input.is_some() || self.output.is_some();
        let free = model.ends_with(":free") && !self.by_other_units;
        if !by_the_token && !free {
            return None;
        }
        let or = |class: &Option<Scale>, wider: &Scale| class.as_ref().unwrap_or(wider).clone();
        let nothing = Scale::default();
        let input = or(&self.input, &nothing);
        let write = or(&self.cache_write, &input);
        let output = or(&self.output, &nothing);
        let calls = or(&self.calls, &nothing).base;
        Some(Rates {
            cached_input: or(&self.cached_input, &input),
            cache_write_1h: or(&self.cache_write_1h, &write),
            cache_write_5m: write,
            input,
            reasoning: or(&self.reasoning, &output),
            output,
            calls: Nanodollars(calls.0.saturating_mul(1_000)),
        })
    }
}

impl<'de> Deserialize<'de> for Sheet {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct SheetVisitor;

        impl<'de> Visitor<'de> for SheetVisitor {
            type Value = Sheet;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("prices")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Sheet, A::Error> {
                let mut sheet = Sheet::default();
                while let Some(key) = map.next_key::<Cow<'de, str>>()? {
                    let price = match &*key {
                        "input_mtok" => &mut sheet.input,
                        "cache_read_mtok" => &mut sheet.cached_input,
                        "cache_write_mtok" => &mut sheet.cache_write,
                        "cache_write_1h_mtok" => &mut sheet.cache_write_1h,
                        "output_mtok" => &mut sheet.output,
                        "output_reasoning_mtok" => &mut sheet.reasoning,
                        "requests_kcount" => &mut sheet.calls,
                        _ => {
                            map.next_value::<IgnoredAny>()?;
                            sheet.by_other_units = true;
                            continue;
                        }
                    };
                    *price = map
                        .next_value::<Option<WrittenScale>>()?
                        .map(|scale| scale.0);
                }
                Ok(sheet)
            }
        }

        deserializer.deserialize_map(SheetVisitor)
    }
}

/// A price: a number, or an object with a `base` and `tiers`.
struct WrittenScale(Scale);

impl<'de> Deserialize<'de> for WrittenScale {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        struct Tiered<'a> {
            #[serde(borrow)]
            base: &'a RawValue,
            #[serde(borrow)]
            tiers: Vec<Tier<'a>>,
        }
        #[derive(Deserialize)]
        struct Tier<'a> {
            start: u64,
            #[serde(borrow)]
            price: &'a RawValue,
        }
        let rate = |written: &RawValue| {
            // The text itself: a float would have lost its last digit.
            let rate = Nanodollars::from_json(written.get())
                .filter(|rate| (Nanodollars::ZERO..ABSURD).contains(rate));
            rate.ok_or_else(|| serde::de::Error::custom(format!("a price of {written}")))
        };
        let written = <&RawValue>::deserialize(deserializer)?;
        if !written.get().starts_with('{') {
            return Ok(Self(Scale::flat(rate(written)?)));
        }
        let tiered: Tiered<'_> =
            serde_json::from_str(written.get()).map_err(serde::de::Error::custom)?;
        let mut steps = tiered
            .tiers
            .iter()
            .map(|tier| {
                Ok(Step {
                    above: tier.start,
                    rate: rate(tier.price)?,
                })
            })
            .collect::<Result<Vec<_>, D::Error>>()?;
        steps.sort_by_key(|step| step.above);
        Ok(Self(Scale {
            base: rate(tiered.base)?,
            steps: (!steps.is_empty()).then(|| Arc::from(steps)),
        }))
    }
}

/// Which names are meant.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Rule {
    Equals(Literal),
    StartsWith(Literal),
    EndsWith(Literal),
    Contains(Literal),
    Regex(Expression),
    And(Vec<Rule>),
    Or(Vec<Rule>),
}

/// How a rule about the beginning or a part of a name is read.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Reading {
    /// As it is written.
    Loose,
    /// Not across a version number: what starts with `gpt-5` may be `gpt-5.9`.
    Strict,
}

impl Rule {
    /// Whether it means this name, in lower case.
    fn matches(&self, name: &str, reading: Reading) -> bool {
        let ends = |matched: usize| reading == Reading::Loose || !version_goes_on(name, matched);
        match self {
            Self::Equals(text) => *text.0 == *name,
            Self::StartsWith(text) => name.starts_with(&*text.0) && ends(text.0.len()),
            Self::EndsWith(text) => name.ends_with(&*text.0),
            Self::Contains(text) => name
                .match_indices(&*text.0)
                .any(|(at, found)| ends(at + found.len())),
            // It fails only where it backtracks too long, on a name that nobody sells.
            Self::Regex(expression) => expression.0.is_match(name).unwrap_or(false),
            Self::And(rules) => rules.iter().all(|rule| rule.matches(name, reading)),
            Self::Or(rules) => rules.iter().any(|rule| rule.matches(name, reading)),
        }
    }
}

#[derive(Debug, Deserialize)]
#[serde(from = "String")]
struct Literal(Box<str>);

impl From<String> for Literal {
    fn from(text: String) -> Self {
        Self(text.to_lowercase().into())
    }
}

#[derive(Debug, Deserialize)]
#[serde(try_from = "String")]
struct Expression(Box<Regex>);

impl TryFrom<String> for Expression {
    type Error = fancy_regex::Error;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        expression(&text).map(|regex| Self(Box::new(regex)))
    }
}

/// Names and addresses are ASCII, and a `\d` of all of Unicode's digits takes ten times as long to
/// compile.
fn expression(text: &str) -> Result<Regex, fancy_regex::Error> {
    Regex::new(&text.replace(r"\d", "[0-9]"))
}

#[derive(Deserialize)]
struct WrittenSeller<'a> {
    #[serde(borrow)]
    id: Cow<'a, str>,
    #[serde(borrow)]
    api_pattern: Cow<'a, str>,
    provider_match: Option<Rule>,
    fallback_model_providers: Option<Vec<Box<str>>>,
    #[serde(borrow)]
    models: Vec<WrittenModel<'a>>,
}

#[derive(Deserialize)]
struct WrittenModel<'a> {
    #[serde(borrow)]
    id: Cow<'a, str>,
    #[serde(rename = "match")]
    names: Rule,
    context_window: Option<u64>,
    #[serde(borrow)]
    prices: &'a RawValue,
    price_variants: Option<Vec<WrittenVariant<'a>>>,
}

#[derive(Deserialize)]
struct WrittenVariant<'a> {
    #[serde(borrow)]
    when: HashMap<Cow<'a, str>, Cow<'a, str>>,
    constraint: Option<WrittenSeason<'a>>,
    #[serde(borrow)]
    prices: &'a RawValue,
}

#[derive(Deserialize)]
struct WrittenSheet<'a> {
    #[serde(borrow)]
    constraint: Option<WrittenSeason<'a>>,
    prices: Sheet,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct WrittenSeason<'a> {
    start_date: Option<&'a str>,
    start_time: Option<&'a str>,
    end_time: Option<&'a str>,
    /// Names the kind, which the fields show.
    #[serde(rename = "type")]
    _kind: Option<&'a str>,
}

impl WrittenSeller<'_> {
    fn check(self) -> Result<Seller, String> {
        let id: Arc<str> = Arc::from(&*self.id);
        if self.id.is_empty() || self.id != self.id.to_lowercase() {
            return Err(format!("a seller is called {:?}", self.id));
        }
        let address = expression(&format!("^(?:{})", self.api_pattern))
            .map_err(|error| format!("{id}: its address: {error}"))?;
        let mut models = Vec::with_capacity(self.models.len());
        let mut names = HashSet::new();
        for model in self.models {
            if !names.insert(model.id.to_string()) {
                return Err(format!("{id}: {} comes twice", model.id));
            }
            let name = model.id.to_string();
            let model = model.check(Arc::clone(&id));
            models.push(Arc::new(
                model.map_err(|error| format!("{id}: {name}: {error}"))?,
            ));
        }
        Ok(Seller {
            id: Box::from(&*id),
            address,
            alias: self.provider_match,
            fallbacks: self.fallback_model_providers.unwrap_or_default(),
            models,
        })
    }
}

impl WrittenModel<'_> {
    fn check(self, seller: Arc<str>) -> Result<Model, String> {
        let unreadable = |error: serde_json::Error| error.to_string();
        let sheets = if self.prices.get().starts_with('[') {
            let written: Vec<WrittenSheet<'_>> =
                serde_json::from_str(self.prices.get()).map_err(unreadable)?;
            written
                .into_iter()
                .map(|sheet| Ok((season(sheet.constraint)?, sheet.prices)))
                .collect::<Result<Vec<_>, String>>()?
        } else {
            vec![(
                None,
                serde_json::from_str(self.prices.get()).map_err(unreadable)?,
            )]
        };
        if sheets.iter().filter(|(season, _)| season.is_none()).count() != 1 {
            return Err("not exactly one of its prices always holds".to_owned());
        }
        let sheets = sheets
            .into_iter()
            .map(|(season, sheet): (_, Sheet)| Priced {
                season,
                rates: sheet.rates(&self.id).map(Arc::new),
                sheet,
            })
            .collect();
        let mut tiers = Vec::new();
        for variant in self.price_variants.unwrap_or_default() {
            let sheet = serde_json::from_str(variant.prices.get()).map_err(unreadable)?;
            let season = season(variant.constraint)?;
            // Batches and the like are no call that passes here.
            if let Some(tier) = variant.when.get("service_tier")
                && variant.when.len() == 1
            {
                tiers.push(TierSheet {
                    tier: Box::from(&**tier),
                    season,
                    sheet,
                });
            }
        }
        Ok(Model {
            id: Box::from(&*self.id),
            seller,
            names: self.names,
            context_window: self.context_window,
            sheets,
            tiers,
        })
    }
}

fn season(written: Option<WrittenSeason<'_>>) -> Result<Option<Season>, String> {
    let Some(written) = written else {
        return Ok(None);
    };
    let second_of_day = |time: &str| {
        let instant = format!("1970-01-01T{time}").parse::<Timestamp>();
        let second = instant.map(|instant| instant.as_second().rem_euclid(DAY_SECS));
        second.map_err(|error| error.to_string())
    };
    match (written.start_date, written.start_time, written.end_time) {
        (Some(date), None, None) => {
            let midnight = date
                .parse::<Date>()
                .and_then(|date| TimeZone::UTC.to_timestamp(date.at(0, 0, 0, 0)));
            let midnight = midnight.map_err(|error| error.to_string())?;
            Ok(Some(Season::From(midnight.as_second())))
        }
        (None, Some(start), Some(end)) => Ok(Some(Season::Daily {
            start: second_of_day(start)?,
            end: second_of_day(end)?,
        })),
        _ => Err("a season that is neither a first day nor a time of day".to_owned()),
    }
}
