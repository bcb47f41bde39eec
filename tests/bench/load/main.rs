//! What Traygate costs, measured beside nginx and a bare forwarder in one run.
//!
//! `scripts/bench` builds this and starts it; see there for how to use it.

#![cfg_attr(
    target_os = "linux",
    expect(clippy::disallowed_methods, reason = "a bench times the real machine")
)]

#[cfg(target_os = "linux")]
mod alarm;
#[cfg(target_os = "linux")]
mod caller;
#[cfg(target_os = "linux")]
mod calls;
#[cfg(target_os = "linux")]
mod chart;
#[cfg(target_os = "linux")]
mod chunks;
#[cfg(target_os = "linux")]
mod closed_loop;
#[cfg(target_os = "linux")]
mod command_line;
#[cfg(target_os = "linux")]
mod forwarder;
#[cfg(target_os = "linux")]
mod machine;
#[cfg(target_os = "linux")]
mod memory;
#[cfg(target_os = "linux")]
mod million;
#[cfg(target_os = "linux")]
mod open_loop;
#[cfg(target_os = "linux")]
mod overhead;
#[cfg(target_os = "linux")]
mod processes;
#[cfg(target_os = "linux")]
mod provider;
#[cfg(target_os = "linux")]
mod report;
#[cfg(target_os = "linux")]
mod samples;
#[cfg(target_os = "linux")]
mod wire;

#[cfg(target_os = "linux")]
fn main() -> std::process::ExitCode {
    command_line::run()
}

#[cfg(not(target_os = "linux"))]
fn main() {
    eprintln!("The bench reads CPU time and memory from /proc: it runs on Linux only.");
}
