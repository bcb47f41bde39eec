//! Traygate: a local LLM proxy. Identical calls cost once, a dead provider fails in a
//! millisecond, every call is on record.
//!
//! The map:
//! - [`call`]: one call, top to bottom;
//! - [`policy`]: decides, without I/O, async or clock;
//! - [`provider`]: what a provider is, and the built-in demo;
//! - [`settings`], [`keys`]: what a person set, and the keys in the OS keyring;
//! - [`store`]: the record in SQLite;
//! - [`admin`]: the admin API, health; [`metrics`]: what Prometheus scrapes;
//! - [`core`]: the parts that calls share; [`events`]: what happens, for whoever watches;
//! - [`mode`]: normal, bypass, refuse; [`listen`] and [`run`]: put it on its port;
//! - [`runtime`]: the file by which the command line finds a running one;
//! - [`cli`]: the command line.

pub mod admin;
pub mod call;
pub mod cli;
pub mod clock;
pub mod core;
pub mod events;
pub mod keys;
pub mod listen;
pub mod metrics;
pub mod mode;
pub mod policy;
pub mod provider;
pub mod run;
pub mod runtime;
pub mod settings;
pub mod store;
