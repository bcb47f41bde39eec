//! One process from its first call to its millionth: does a call get dearer?

use std::fmt::Write;
use std::time::Duration;

use serde_json::json;

use crate::calls::Workload;
use crate::closed_loop::{Extent, Measured, block};
use crate::command_line::Bench;
use crate::processes::{Served, Target, start};
use crate::{machine, report};

const SPANS: u64 = 10;
const ALONE: u64 = 2000;
const TOGETHER: u64 = 20_000;
const CONNECTIONS: usize = 50;

/// A look at the process after some number of calls.
struct Look {
    after_calls: u64,
    alone: Measured,
    together: Measured,
    resident: u64,
}

/// Makes `calls` calls through one process, looking at it ten times on the way.
pub async fn run(bench: &Bench, target: Target, calls: u64) -> anyhow::Result<()> {
    let machine = machine::describe();
    let served = start(target, bench.provider_address, None, &bench.setup)?;
    let mut looks = vec![look(bench, &served).await?];
    for span in 1..=SPANS {
        let aim = (calls * span / SPANS).saturating_sub(ALONE + TOGETHER);
        let missing = aim.saturating_sub(bench.numbers.taken());
        let extent = Extent {
            calls: missing,
            time: Duration::ZERO,
        };
        block(bench, &served, Workload::Chat, CONNECTIONS, extent).await?;
        looks.push(look(bench, &served).await?);
        eprintln!("{} calls", bench.numbers.taken());
    }
    let made = bench.numbers.taken();
    let recorded = served.end()?;
    let mut text = format!(
        "{}\n\n### {} from the first call to number {}\n\n\
         | from call | p50 ms at 1 | p50 ms at {CONNECTIONS} | p99 ms at {CONNECTIONS} | calls/s | CPU µs a call | RSS MB |\n\
         |---:|---:|---:|---:|---:|---:|---:|\n",
        machine::in_words(&machine),
        target.name(),
        made,
    );
    let mut json_looks = Vec::new();
    for look in &mut looks {
        let (alone, together) = (&mut look.alone, &mut look.together);
        let p50_alone = alone.whole.percentile_ms(50.0).unwrap_or(0.0);
        let p50 = together.whole.percentile_ms(50.0).unwrap_or(0.0);
        let p99 = together.whole.percentile_ms(99.0).unwrap_or(0.0);
        let (rate, cpu, resident) = (together.rate(), together.cpu_us(), look.resident);
        let _ = writeln!(
            text,
            "| {} | {p50_alone:.3} | {p50:.3} | {p99:.3} | {rate:.0} | {} | {:.1} |",
            look.after_calls,
            cpu.map_or_else(|| "–".to_owned(), |cpu| format!("{cpu:.1}")),
            resident as f64 / 1e6
        );
        json_looks.push(json!({
            "from_call": look.after_calls, "p50_ms_at_1": p50_alone, "p50_ms_at_50": p50,
            "p99_ms_at_50": p99, "calls_per_second": rate, "cpu_us_per_call": cpu,
            "resident_bytes": resident,
        }));
    }
    if let Some(recorded) = recorded {
        let _ = writeln!(
            text,
            "\n{} of {} calls were on record when it had ended.",
            recorded.rows, recorded.calls
        );
    }
    println!("{text}");
    let json = json!({
        "environment": machine, "target": target.name(), "looks": json_looks,
        "calls": made, "rows_on_record": recorded.map(|recorded| recorded.rows),
    });
    report::write_report(&bench.out, "million", &text, &json)
}

async fn look(bench: &Bench, served: &Served) -> anyhow::Result<Look> {
    let after_calls = bench.numbers.taken() + 1;
    let extent = |calls| Extent {
        calls,
        time: Duration::ZERO,
    };
    let alone = block(bench, served, Workload::Chat, 1, extent(ALONE)).await?;
    let together = block(bench, served, Workload::Chat, CONNECTIONS, extent(TOGETHER)).await?;
    let resident = served
        .process()
        .map_or(Ok(0), |process| process.resident())?;
    Ok(Look {
        after_calls,
        alone,
        together,
        resident,
    })
}
