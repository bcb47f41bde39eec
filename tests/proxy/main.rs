//! The proxy, through its door: every test starts the real thing and drives it as a client would.

mod breaker;
mod bytes;
mod command_line;
mod connections;
mod dedup;
mod headers;
mod pool;
mod record;
mod routes;
mod safety;
mod scenarios;
mod support;
mod timeouts;
mod uploads;
