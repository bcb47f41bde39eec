//! Traygate: a local LLM proxy. Identical calls cost once, a dead provider fails in a
//! millisecond, every call is on record.
//!
//! The map:
//! - [`call`]: one call, top to bottom;
//! - [`policy`]: decides, without I/O, async or clock;
//! - [`provider`]: what a provider is, and the built-in demo;
//! - [`settings`], [`keys`]: what a person set, and the keys in the OS keyring;
//! - [`store`]: the record in SQLite;
//! - [`core`]: the parts that calls share; [`listen`] and [`run`] put it on its port;
//! - [`cli`]: the command line.

pub mod call;
pub mod cli;
pub mod clock;
pub mod core;
pub mod keys;
pub mod listen;
pub mod policy;
pub mod provider;
pub mod run;
pub mod settings;
pub mod store;
