//! Turns findings into Markdown on the screen, JSON and pictures in the report folder.

use std::fmt::Write;
use std::fs;
use std::path::Path;

use serde_json::{Value, json};

use crate::calls::Workload;
use crate::chart;
use crate::closed_loop::Measured;
use crate::machine;
use crate::open_loop::ALLOWANCE_MS;
use crate::overhead::{Cell, Findings, OpenLoop};
use crate::processes::Target;

/// Prints the overhead report and writes `overhead.md`, `.json` and `.svg`.
pub fn overhead(
    out: &Path,
    machine: &Value,
    repeats: usize,
    findings: &mut Findings,
) -> anyhow::Result<()> {
    let closed: Vec<_> = findings.closed.iter_mut().map(row).collect();
    let threads: Vec<_> = findings.threads.iter_mut().map(row).collect();
    let mut text = markdown(machine, repeats, &closed, &threads, &findings.open);
    let goals = goals(&closed);
    if !goals.is_empty() {
        goals_table(&mut text, &goals);
    }
    let recorded = findings.recorded;
    if recorded.calls > 0 {
        let _ = writeln!(
            text,
            "\nTraygate had {} of its {} calls on record when it had ended.",
            recorded.rows, recorded.calls
        );
    }
    println!("{text}");
    let json = json!({
        "environment": machine,
        "repeats": repeats,
        "closed_loop": closed.iter().map(Row::json).collect::<Vec<_>>(),
        "open_loop": findings.open.iter().map(open_json).collect::<Vec<_>>(),
        "goals": goals.iter().map(Goal::json).collect::<Vec<_>>(),
        "calls_through_traygate": recorded.calls,
        "rows_on_record": recorded.rows,
        "worker_threads": threads.iter().map(Row::json).collect::<Vec<_>>(),
    });
    write_report(out, "overhead", &text, &json)?;
    if let Some(picture) = chart::overhead(machine, &closed, &findings.open) {
        fs::write(out.join("overhead.svg"), picture)?;
    }
    println!(
        "Written to {}.",
        out.join("overhead.{md,json,svg}").display()
    );
    Ok(())
}

/// Writes a report's Markdown and JSON.
pub fn write_report(out: &Path, name: &str, text: &str, json: &Value) -> anyhow::Result<()> {
    fs::write(out.join(format!("{name}.md")), text)?;
    fs::write(
        out.join(format!("{name}.json")),
        serde_json::to_string_pretty(json)? + "\n",
    )?;
    Ok(())
}

/// A cell, with its percentiles taken. Times are milliseconds.
pub struct Row {
    /// The way to the provider.
    pub target: Target,
    /// The kind of calls.
    pub workload: Workload,
    /// Connections.
    pub connections: usize,
    workers: Option<usize>,
    calls: u64,
    /// Median of whole calls.
    pub p50: f64,
    p99: f64,
    first_p50: Option<f64>,
    first_p99: Option<f64>,
    gap_p99: Option<f64>,
    /// Calls a second.
    pub rate: f64,
    /// Microseconds of the proxy's CPU a call, where there was enough to count.
    pub cpu_us: Option<f64>,
    provider_cpu_us: f64,
    load_cpu_us: f64,
    repeats: Vec<Value>,
    p50_spread: (f64, f64),
}

fn row(cell: &mut Cell) -> Row {
    let mut spread = (f64::INFINITY, 0.0_f64);
    let mut repeats = Vec::new();
    for repeat in &mut cell.repeats {
        let p50 = repeat.whole.percentile_ms(50.0).unwrap_or(0.0);
        spread = (spread.0.min(p50), spread.1.max(p50));
        repeats.push(json!({
            "calls": repeat.calls,
            "seconds": repeat.elapsed.as_secs_f64(),
            "p50_ms": p50,
            "p99_ms": repeat.whole.percentile_ms(99.0),
            "calls_per_second": repeat.rate(),
            "cpu_us_per_call": repeat.cpu_us(),
        }));
    }
    let pooled = &mut cell.pooled;
    let per_call = |total: std::time::Duration, measured: &Measured| {
        total.as_secs_f64() * 1e6 / measured.calls as f64
    };
    Row {
        target: cell.target,
        workload: cell.workload,
        connections: cell.connections,
        workers: cell.workers,
        calls: pooled.calls,
        p50: pooled.whole.percentile_ms(50.0).unwrap_or(0.0),
        p99: pooled.whole.percentile_ms(99.0).unwrap_or(0.0),
        first_p50: pooled.first_content.percentile_ms(50.0),
        first_p99: pooled.first_content.percentile_ms(99.0),
        gap_p99: pooled.gaps.percentile_ms(99.0),
        rate: pooled.rate(),
        cpu_us: pooled.cpu_us(),
        provider_cpu_us: per_call(pooled.provider_cpu, pooled),
        load_cpu_us: per_call(pooled.load_cpu, pooled),
        repeats,
        p50_spread: spread,
    }
}

impl Row {
    fn json(&self) -> Value {
        json!({
            "target": self.target.name(),
            "workload": self.workload.name(),
            "connections": self.connections,
            "worker_threads": self.workers,
            "calls": self.calls,
            "p50_ms": self.p50,
            "p99_ms": self.p99,
            "first_content_p50_ms": self.first_p50,
            "first_content_p99_ms": self.first_p99,
            "gap_p99_ms": self.gap_p99,
            "calls_per_second": self.rate,
            "cpu_us_per_call": self.cpu_us,
            "provider_cpu_us_per_call": self.provider_cpu_us,
            "load_cpu_us_per_call": self.load_cpu_us,
            "repeats": self.repeats,
        })
    }

    /// The time that matters: of a stream the first content, else the whole call.
    fn latency(&self) -> (f64, f64) {
        match (self.first_p50, self.first_p99) {
            (Some(p50), Some(p99)) => (p50, p99),
            _ => (self.p50, self.p99),
        }
    }

    fn same_load(&self, other: &Row) -> bool {
        (self.workload, self.connections, self.workers)
            == (other.workload, other.connections, other.workers)
    }
}

fn markdown(
    machine: &Value,
    repeats: usize,
    closed: &[Row],
    threads: &[Row],
    open: &[OpenLoop],
) -> String {
    let mut text = format!("{}\n", machine::in_words(machine));
    let _ = writeln!(
        text,
        "{repeats} repeats, order alternating, every answer checked; ratios are to nginx in the same run."
    );
    for workload in [Workload::Chat, Workload::Tool, Workload::Stream] {
        let rows: Vec<_> = closed
            .iter()
            .filter(|row| row.workload == workload)
            .collect();
        if !rows.is_empty() {
            closed_table(&mut text, workload, &rows, closed);
        }
    }
    if !open.is_empty() {
        open_table(&mut text, open);
    }
    if !threads.is_empty() {
        threads_table(&mut text, threads);
    }
    text
}

fn closed_table(text: &mut String, workload: Workload, rows: &[&Row], all: &[Row]) {
    let (title, last) = match workload {
        Workload::Chat => ("chat", "p50 of each repeat"),
        Workload::Tool => ("chat with a tool", "p50 of each repeat"),
        Workload::Stream | Workload::Stamped => {
            ("stream, time to the first content event", "gap p99")
        }
    };
    let _ = write!(
        text,
        "\n### {title}\n\n| connections | target | p50 ms | added p50 | p99 ms | calls/s | CPU µs a call | {last} |\n\
         |---:|---|---:|---:|---:|---:|---:|---:|\n"
    );
    for row in rows {
        let beside = |target| {
            all.iter()
                .find(|other| other.target == target && other.same_load(row))
        };
        let nginx = beside(Target::Nginx).filter(|_| row.target != Target::Nginx);
        let (p50, p99) = row.latency();
        let added = beside(Target::Direct)
            .filter(|_| row.target != Target::Direct)
            .map_or_else(String::new, |direct| {
                format!("{:+.3}", p50 - direct.latency().0)
            });
        let cpu = cpu_cell(row, nginx);
        let last = match row.gap_p99 {
            Some(gap) => {
                let direct = beside(Target::Direct).filter(|_| row.target != Target::Direct);
                let change = direct
                    .and_then(|direct| direct.gap_p99)
                    .map(|direct| gap / direct);
                format!(
                    "{gap:.2}{}",
                    change.map_or(String::new(), |change| format!(
                        " ({:+.1} %)",
                        (change - 1.0) * 100.0
                    ))
                )
            }
            None => format!("{:.3}–{:.3}", row.p50_spread.0, row.p50_spread.1),
        };
        let _ = writeln!(
            text,
            "| {} | {} | {p50:.3}{} | {added} | {p99:.3} | {:.0}{} | {cpu} | {last} |",
            row.connections,
            row.target.name(),
            ratio(nginx.map(|nginx| p50 / nginx.latency().0)),
            row.rate,
            ratio(nginx.map(|nginx| row.rate / nginx.rate)),
        );
    }
}

fn cpu_cell(row: &Row, nginx: Option<&Row>) -> String {
    let beside = row.cpu_us.zip(nginx.and_then(|nginx| nginx.cpu_us));
    match row.cpu_us {
        Some(cpu) => format!("{cpu:.1}{}", ratio(beside.map(|(own, nginx)| own / nginx))),
        None => "–".to_owned(),
    }
}

fn ratio(ratio: Option<f64>) -> String {
    ratio.map_or_else(String::new, |ratio| format!(" ({ratio:.2}×)"))
}

/// The middle of the knees of all repeats.
pub fn median_knee(open: &OpenLoop) -> f64 {
    let mut rates: Vec<_> = open.knees.iter().map(|knee| knee.rate).collect();
    rates.sort_by(f64::total_cmp);
    rates.get(rates.len() / 2).copied().unwrap_or(0.0)
}

fn open_table(text: &mut String, open: &[OpenLoop]) {
    let _ = write!(
        text,
        "\n### open loop: chat at a fixed rate, timed from the scheduled start\n\nThe knee is the highest rate \
         that was kept up with p99 within {ALLOWANCE_MS} ms of its own floor.\n\n\
         | target | knee, calls/s | of each repeat | p50 ms at 1,000/s | p99 ms at 1,000/s | p99 ms at the knee |\n\
         |---|---:|---|---:|---:|---:|\n"
    );
    let nginx = open
        .iter()
        .find(|open| open.target == Target::Nginx)
        .map(median_knee);
    for open in open {
        let median = median_knee(open);
        let beside = nginx
            .filter(|_| open.target != Target::Nginx)
            .map(|nginx| median / nginx);
        let each: Vec<_> = open
            .knees
            .iter()
            .map(|knee| format!("{:.0}", knee.rate))
            .collect();
        let median_run = open
            .knees
            .iter()
            .find(|knee| knee.rate.total_cmp(&median).is_eq());
        let Some(knee) = median_run else { continue };
        let lowest = knee.steps.first();
        let at_knee = knee.steps.iter().rfind(|step| step.held);
        let number =
            |value: Option<f64>| value.map_or_else(String::new, |value| format!("{value:.3}"));
        let _ = writeln!(
            text,
            "| {} | {median:.0}{} | {} | {} | {} | {} |",
            open.target.name(),
            ratio(beside),
            each.join(", "),
            number(lowest.map(|step| step.p50_ms)),
            number(lowest.map(|step| step.p99_ms)),
            number(at_knee.map(|step| step.p99_ms)),
        );
    }
}

fn threads_table(text: &mut String, rows: &[Row]) {
    let _ = write!(
        text,
        "\n### worker threads: chat at {} connections\n\n\
         | threads | target | p50 ms | p99 ms | calls/s | CPU µs a call |\n|---:|---|---:|---:|---:|---:|\n",
        rows[0].connections
    );
    for row in rows {
        let nginx = rows.iter().find(|other| {
            row.target != Target::Nginx && other.target == Target::Nginx && other.same_load(row)
        });
        let _ = writeln!(
            text,
            "| {} | {} | {:.3} | {:.3} | {:.0}{} | {} |",
            row.workers.unwrap_or_default(),
            row.target.name(),
            row.p50,
            row.p99,
            row.rate,
            ratio(nginx.map(|nginx| row.rate / nginx.rate)),
            cpu_cell(row, nginx),
        );
    }
}

/// What was hoped for, and what came of it.
struct Goal {
    what: &'static str,
    limit: f64,
    /// Whether `limit` is a floor, not a ceiling.
    at_least: bool,
    measured: f64,
}

impl Goal {
    fn met(&self) -> bool {
        if self.at_least {
            self.measured >= self.limit
        } else {
            self.measured <= self.limit
        }
    }

    fn json(&self) -> Value {
        json!({ "what": self.what, "limit": self.limit, "at_least": self.at_least, "measured": self.measured, "met": self.met() })
    }
}

/// The goals whose blocks were run.
fn goals(closed: &[Row]) -> Vec<Goal> {
    let find = |target, workload, connections| {
        closed.iter().find(|row| {
            (row.target, row.workload, row.connections) == (target, workload, connections)
        })
    };
    let beside = |other, workload, connections, of: fn(&Row) -> Option<f64>| {
        let own = of(find(Target::Traygate, workload, connections)?)?;
        Some(own / of(find(other, workload, connections)?)?)
    };
    let goal = |what, limit, at_least, measured: Option<f64>| {
        measured.map(|measured| Goal {
            what,
            limit,
            at_least,
            measured,
        })
    };
    let chat = Workload::Chat;
    let busy = find(Target::Traygate, chat, 50);
    let gap = |connections| {
        beside(Target::Direct, Workload::Stream, connections, |row| {
            row.gap_p99
        })
    };
    [
        goal(
            "CPU a chat call at 50, µs",
            40.0,
            false,
            busy.and_then(|row| row.cpu_us),
        ),
        goal(
            "the same over the bare forwarder's",
            1.8,
            false,
            beside(Target::Forwarder, chat, 50, |row| row.cpu_us),
        ),
        goal(
            "calls a second at 50 over nginx's",
            0.6,
            true,
            beside(Target::Nginx, chat, 50, |row| Some(row.rate)),
        ),
        goal(
            "p50 at 1 over nginx's",
            1.6,
            false,
            beside(Target::Nginx, chat, 1, |row| Some(row.p50)),
        ),
        goal("stream gap p99 over direct's, at 1", 1.05, false, gap(1)),
        goal("stream gap p99 over direct's, at 10", 1.05, false, gap(10)),
        goal("stream gap p99 over direct's, at 50", 1.05, false, gap(50)),
    ]
    .into_iter()
    .flatten()
    .collect()
}

fn goals_table(text: &mut String, goals: &[Goal]) {
    text.push_str("\n### goals\n\n| what | goal | measured | |\n|---|---|---:|---|\n");
    for goal in goals {
        let bound = if goal.at_least { "at least" } else { "at most" };
        let verdict = if goal.met() { "pass" } else { "**miss**" };
        let _ = writeln!(
            text,
            "| {} | {bound} {} | {:.2} | {verdict} |",
            goal.what, goal.limit, goal.measured
        );
    }
}

fn open_json(open: &OpenLoop) -> Value {
    let knees = open.knees.iter().map(|knee| {
        let steps = knee.steps.iter().map(|step| {
            json!({
                "offered_per_second": step.offered,
                "achieved_per_second": step.achieved,
                "p50_ms": step.p50_ms,
                "p99_ms": step.p99_ms,
                "held": step.held,
            })
        });
        json!({ "knee_per_second": knee.rate, "steps": steps.collect::<Vec<_>>() })
    });
    json!({ "target": open.target.name(), "median_knee_per_second": median_knee(open), "repeats": knees.collect::<Vec<_>>() })
}
