//! The proxy, through its door: every test starts the real thing and drives it as a client would.

mod support;
