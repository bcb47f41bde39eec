//! How long the events of a stream are on their way: the provider writes the time into each, and
//! the client looks at the same clock when it has it.

use std::fmt::Write;
use std::io;
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};
use serde_json::json;
use tokio::task::JoinSet;

use crate::alarm::Alarm;
use crate::caller::Caller;
use crate::calls::{Pace, Workload};
use crate::command_line::Bench;
use crate::processes::{Served, Target, start};
use crate::samples::Samples;
use crate::{machine, report};

const GAP_MS: u32 = 10;
/// How long each block goes on, whatever the number of streams.
const BLOCK: Duration = Duration::from_secs(10);
/// What 99 in 100 events are to be on their way at most.
const GOAL: Duration = Duration::from_millis(2);
const GOAL_SHARE: f64 = 0.99;

/// Nanoseconds of a clock that all processes of this machine share.
pub fn monotonic_nanos() -> u64 {
    let time = clock_gettime(ClockId::Monotonic);
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    seconds * 1_000_000_000 + u64::try_from(time.tv_nsec).unwrap_or(0)
}

/// One way to the provider with so many streams, pooled over its repeats.
struct Cell {
    target: Target,
    streams: u32,
    transits: Samples,
}

/// Measures both ways in turns and writes the report.
pub async fn run(bench: &Bench, streams: &[u32], repeats: usize) -> anyhow::Result<()> {
    let machine = machine::describe();
    let mut ways = Vec::new();
    for target in [Target::Direct, Target::Traygate] {
        ways.push(start(target, bench.provider_address, None, &bench.setup)?);
    }
    let mut cells = Vec::new();
    for &streams in streams {
        let mut pair = [Target::Direct, Target::Traygate].map(|target| Cell {
            target,
            streams,
            transits: Samples::default(),
        });
        for repeat in 0..repeats {
            eprintln!("chunks: {streams} at once, {} of {repeats}", repeat + 1);
            for (cell, served) in pair.iter_mut().zip(&ways) {
                cell.transits.merge(&block(bench, served, streams).await?);
            }
        }
        cells.extend(pair);
    }
    let mut text = format!(
        "{}\n\n### events on their way, provider to client, {GAP_MS} ms apart\n\n\
         | streams | way | events | p50 ms | p99 ms | p50 more | p99 more | within 2 ms |\n\
         |---:|---|---:|---:|---:|---:|---:|---:|\n",
        machine::in_words(&machine)
    );
    let mut rows = Vec::new();
    let mut direct = (0.0, 0.0);
    for cell in &mut cells {
        let p50 = cell.transits.percentile_ms(50.0).unwrap_or(0.0);
        let p99 = cell.transits.percentile_ms(99.0).unwrap_or(0.0);
        let share = cell.transits.share_within(GOAL).unwrap_or(0.0);
        let more = match cell.target {
            Target::Direct => {
                direct = (p50, p99);
                String::from("| |")
            }
            _ => format!("| {:.3} | {:.3}", p50 - direct.0, p99 - direct.1),
        };
        let events = cell.transits.count();
        let way = cell.target.name();
        let _ = writeln!(
            text,
            "| {} | {way} | {events} | {p50:.3} | {p99:.3} {more} | {:.2} % |",
            cell.streams,
            share * 100.0
        );
        rows.push(json!({
            "streams": cell.streams, "target": way, "events": events, "p50_ms": p50,
            "p99_ms": p99, "share_within_2_ms": share,
        }));
    }
    let is_met = |target| {
        let mut of_target = cells.iter().filter(|cell| cell.target == target);
        of_target.all(|cell| cell.transits.share_within(GOAL) >= Some(GOAL_SHARE))
    };
    let verdict = match (is_met(Target::Traygate), is_met(Target::Direct)) {
        (true, _) => "pass",
        (false, true) => "miss",
        (false, false) => "not to be told here, since not even direct they all were",
    };
    let _ = writeln!(
        text,
        "\n99 % of the events through Traygate within 2 ms, both hops and the client's own delay \
         counted: {verdict}."
    );
    println!("{text}");
    let json = json!({"environment": machine, "gap_ms": GAP_MS, "repeats": repeats, "rows": rows});
    report::write_report(&bench.out, "chunks", &text, &json)
}

/// So many streams at once, begun evenly within a gap, so that their events do not come in crowds.
async fn block(bench: &Bench, served: &Served, streams: u32) -> io::Result<Samples> {
    let gap = Duration::from_millis(GAP_MS.into());
    let pace = Pace {
        events: u32::try_from(BLOCK.as_millis()).unwrap_or(u32::MAX) / GAP_MS,
        gap_ms: GAP_MS,
    };
    let address = served.address(Workload::Stamped);
    let start = Instant::now() + gap;
    let mut running = JoinSet::new();
    for place in 0..streams {
        let number = bench.numbers.next();
        running.spawn_local(async move {
            let mut caller = Caller::connect(address, Workload::Stamped, pace).await?;
            Alarm::new()?.until(start + gap * place / streams).await?;
            let head = caller.open_stream(&number).await?;
            caller.read_stamped(&head, &number).await
        });
    }
    let mut transits = Samples::default();
    for ended in running.join_all().await {
        ended?
            .into_iter()
            .for_each(|transit| transits.push(transit));
    }
    served.add_made(streams.into());
    Ok(transits)
}
