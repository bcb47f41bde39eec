//! The proxy, through its door: every test starts the real thing and drives it as a client would.

mod admin;
mod breaker;
mod budget;
mod bytes;
mod command_line;
mod connections;
mod dedup;
mod headers;
mod log_trouble;
mod metrics;
mod pool;
mod prices;
mod record;
mod repeats;
mod routes;
mod safety;
mod scenarios;
mod secure_upstream;
mod settings_live;
mod spend;
mod starting;
mod support;
mod timeouts;
mod uploads;
mod usage;
