//! Resident memory: idle, with many open streams, and after they have ended.

use std::io;
use std::time::{Duration, Instant};

use anyhow::Context;
use serde_json::json;
use tokio::task::JoinSet;

use crate::caller::Caller;
use crate::calls::{Pace, Workload};
use crate::command_line::Bench;
use crate::processes::{Target, start};
use crate::{machine, report};

/// Slow enough that all streams are open at once, with events going through all of them.
const PACE: Pace = Pace {
    events: 20,
    gap_ms: 500,
};
const SETTLE: Duration = Duration::from_secs(2);

/// Measures Traygate and writes the report.
pub async fn run(bench: &Bench, streams: usize) -> anyhow::Result<()> {
    let machine = machine::describe();
    let served = start(Target::Traygate, bench.provider_address, None, &bench.setup)?;
    let process = served.process().context("traygate is a process")?;
    tokio::time::sleep(SETTLE).await;
    let idle = process.resident()?;

    let address = served.address(Workload::Stream);
    let mut opening = JoinSet::new();
    for _ in 0..streams {
        let number = bench.numbers.next();
        opening.spawn_local(async move {
            let mut caller = Caller::connect(address, Workload::Stream, PACE).await?;
            let start = Instant::now();
            let head = caller.open_stream(&number).await?;
            io::Result::Ok((caller, head, number, start))
        });
    }
    let opened: Vec<_> = opening
        .join_all()
        .await
        .into_iter()
        .collect::<io::Result<_>>()?;
    let mut reading = JoinSet::new();
    for (mut caller, head, number, start) in opened {
        reading.spawn_local(async move { caller.read_stream(&head, &number, start).await });
    }
    let mut peak = process.resident()?;
    let mut samples = vec![peak];
    let mut tick = tokio::time::interval(Duration::from_millis(250));
    while !reading.is_empty() {
        tokio::select! {
            Some(ended) = reading.join_next() => { ended??; }
            _ = tick.tick() => {
                let now = process.resident()?;
                peak = peak.max(now);
                samples.push(now);
            }
        }
    }
    tokio::time::sleep(SETTLE).await;
    let after = process.resident()?;

    let mb = |bytes: u64| bytes as f64 / 1e6;
    let verdict = |met: bool| if met { "pass" } else { "miss" };
    let text = format!(
        "{}\n\n### memory of traygate (RSS, MB = 10^6 bytes)\n\n| | MB | goal | |\n|---|---:|---|---|\n\
         | idle, 2 s after its start | {:.1} | under 30 | {} |\n\
         | {streams} streams open, highest seen | {:.1} | under 150 | {} |\n\
         | 2 s after they ended | {:.1} | | |\n",
        machine::in_words(&machine),
        mb(idle),
        verdict(mb(idle) < 30.0),
        mb(peak),
        verdict(mb(peak) < 150.0),
        mb(after),
    );
    println!("{text}");
    let json = json!({
        "environment": machine, "streams": streams, "idle_bytes": idle, "peak_bytes": peak,
        "after_bytes": after, "every_250_ms": samples,
    });
    report::write_report(&bench.out, "memory", &text, &json)
}
