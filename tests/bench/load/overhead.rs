//! The overhead bench: every cell of target × workload × connections, in turns.

use std::time::Duration;

use anyhow::bail;

use crate::calls::Workload;
use crate::closed_loop::{Extent, Measured, block};
use crate::command_line::{Bench, OverheadOptions, Part};
use crate::open_loop::{Knee, find_knee};
use crate::processes::{Recorded, Served, Target, nginx_version, start};
use crate::report;

/// The connections of the worker-threads part.
const THREADS_AT: usize = 50;

/// One cell of the closed loop, pooled over its repeats.
pub struct Cell {
    /// The way to the provider.
    pub target: Target,
    /// The kind of calls.
    pub workload: Workload,
    /// Connections.
    pub connections: usize,
    /// Worker threads, where the part sets them.
    pub workers: Option<usize>,
    /// All samples together.
    pub pooled: Measured,
    /// Each repeat apart, for the spread.
    pub repeats: Vec<Measured>,
}

impl Cell {
    fn new(target: Target, workload: Workload, connections: usize, workers: Option<usize>) -> Self {
        Self {
            target,
            workload,
            connections,
            workers,
            pooled: Measured::default(),
            repeats: Vec::new(),
        }
    }

    fn add(&mut self, measured: Measured) {
        self.pooled.pool(&measured);
        self.repeats.push(measured);
    }
}

/// The knees of one target, one a repeat.
pub struct OpenLoop {
    /// The way to the provider.
    pub target: Target,
    /// One a repeat.
    pub knees: Vec<Knee>,
}

/// All that one run showed.
#[derive(Default)]
pub struct Findings {
    /// The closed loop.
    pub closed: Vec<Cell>,
    /// The open loop.
    pub open: Vec<OpenLoop>,
    /// The closed loop at 50 by worker threads.
    pub threads: Vec<Cell>,
    /// Traygate's record of all this.
    pub recorded: Recorded,
}

/// Runs the parts asked for and writes the report.
pub async fn run(bench: &Bench, mut options: OverheadOptions) -> anyhow::Result<()> {
    if options.targets.contains(&Target::Nginx) && nginx_version().is_none() {
        eprintln!(
            "bench: nginx is left out, it is not installed (Debian: apt-get install nginx-light)"
        );
        options.targets.retain(|target| *target != Target::Nginx);
    }
    if options.targets.is_empty() {
        bail!("no target to measure");
    }
    let repeats = options.repeats.unwrap_or(if options.quick { 1 } else { 3 });
    let machine = crate::machine::describe();
    let mut findings = Findings::default();
    if options.parts.contains(&Part::Closed) || options.parts.contains(&Part::Open) {
        let served = start_all(bench, &options, None)?;
        if options.parts.contains(&Part::Closed) {
            findings.closed = closed(bench, &options, &served, repeats).await?;
        }
        if options.parts.contains(&Part::Open) {
            findings.open = open(bench, &options, &served, repeats).await?;
        }
        end_all(served, &mut findings.recorded)?;
    }
    if options.parts.contains(&Part::Threads) {
        threads(bench, &options, repeats, &mut findings).await?;
    }
    report::overhead(&bench.out, &machine, repeats, &mut findings)
}

fn start_all(
    bench: &Bench,
    options: &OverheadOptions,
    workers: Option<usize>,
) -> anyhow::Result<Vec<Served>> {
    let targets = options.targets.iter();
    targets
        .map(|target| start(*target, bench.provider_address, workers, &bench.setup))
        .collect()
}

/// Ends them, and adds what Traygate has on record to `recorded`.
fn end_all(served: Vec<Served>, recorded: &mut Recorded) -> anyhow::Result<()> {
    for served in served {
        if let Some(more) = served.end()? {
            recorded.calls += more.calls;
            recorded.rows += more.rows;
        }
    }
    Ok(())
}

/// Every second turn goes backwards, so that no target always runs on a machine
/// that the same other one has just warmed, or that gets slower with time.
fn in_turn(served: &[Served], repeat: usize) -> Vec<&Served> {
    let mut order: Vec<_> = served.iter().collect();
    if repeat % 2 == 1 {
        order.reverse();
    }
    order
}

async fn closed(
    bench: &Bench,
    options: &OverheadOptions,
    served: &[Served],
    repeats: usize,
) -> anyhow::Result<Vec<Cell>> {
    let mut cells = Vec::new();
    for &workload in &options.workloads {
        for &connections in &options.connections {
            eprintln!("closed loop: {} at {connections}", workload.name());
            let mut row: Vec<_> = served
                .iter()
                .map(|served| Cell::new(served.target, workload, connections, None))
                .collect();
            measure_row(bench, options, served, repeats, &mut row).await?;
            cells.append(&mut row);
        }
    }
    Ok(cells)
}

/// Fills one row of cells, which differ in their target only.
async fn measure_row(
    bench: &Bench,
    options: &OverheadOptions,
    served: &[Served],
    repeats: usize,
    row: &mut [Cell],
) -> anyhow::Result<()> {
    for repeat in 0..repeats {
        for served in in_turn(served, repeat) {
            let cell = row.iter_mut().find(|cell| cell.target == served.target);
            let cell = cell.expect("a cell for every target");
            let extent = extent(cell.workload, options.quick);
            cell.add(block(bench, served, cell.workload, cell.connections, extent).await?);
        }
    }
    Ok(())
}

fn extent(workload: Workload, quick: bool) -> Extent {
    let calls = if workload.streams() { 100 } else { 1000 };
    match (quick, workload.streams()) {
        (true, true) => Extent {
            calls: 10,
            time: Duration::ZERO,
        },
        (true, false) => Extent {
            calls,
            time: Duration::from_millis(300),
        },
        (false, _) => Extent {
            calls,
            time: Duration::from_secs(2),
        },
    }
}

async fn open(
    bench: &Bench,
    options: &OverheadOptions,
    served: &[Served],
    repeats: usize,
) -> anyhow::Result<Vec<OpenLoop>> {
    let hold = Duration::from_millis(if options.quick { 300 } else { 1500 });
    let mut found: Vec<_> = served
        .iter()
        .map(|served| OpenLoop {
            target: served.target,
            knees: Vec::new(),
        })
        .collect();
    for repeat in 0..repeats {
        for served in in_turn(served, repeat) {
            eprintln!("open loop: {}", served.target.name());
            let knee = find_knee(bench, served, hold).await?;
            let target = found.iter_mut().find(|open| open.target == served.target);
            target.expect("an entry for every target").knees.push(knee);
        }
    }
    Ok(found)
}

async fn threads(
    bench: &Bench,
    options: &OverheadOptions,
    repeats: usize,
    findings: &mut Findings,
) -> anyhow::Result<()> {
    for &workers in &options.worker_threads {
        eprintln!("worker threads: {workers}");
        let mut served = start_all(bench, options, Some(workers))?;
        served.retain(|served| served.target != Target::Direct);
        let mut row: Vec<_> = served
            .iter()
            .map(|served| Cell::new(served.target, Workload::Chat, THREADS_AT, Some(workers)))
            .collect();
        measure_row(bench, options, &served, repeats, &mut row).await?;
        findings.threads.append(&mut row);
        end_all(served, &mut findings.recorded)?;
    }
    Ok(())
}
