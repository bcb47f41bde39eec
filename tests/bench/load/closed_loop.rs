//! Blocks of calls where each connection sends its next call when it has its answer.

use std::cell::Cell;
use std::io;
use std::rc::Rc;
use std::time::{Duration, Instant};

use anyhow::Context;
use tokio::task::JoinSet;

use crate::caller::Caller;
use crate::calls::{STANDARD_PACE, Workload};
use crate::command_line::Bench;
use crate::processes::{Served, cpu_of};
use crate::samples::Samples;

/// Streams begin spread over this time. All of them last the same, so those that
/// began together would stay together and each event would meet a crowd.
const STREAM_TIME: Duration = Duration::from_millis(190);

/// How long a block goes on: until both are reached.
#[derive(Clone, Copy, Debug)]
pub struct Extent {
    /// At least this many calls.
    pub calls: u64,
    /// At least this long.
    pub time: Duration,
}

/// What one block showed, or several pooled.
#[derive(Clone, Debug, Default)]
pub struct Measured {
    /// Calls made, all of them answered and checked.
    pub calls: u64,
    /// How long the blocks took.
    pub elapsed: Duration,
    /// CPU time of the proxy.
    pub proxy_cpu: Duration,
    /// CPU time of the provider.
    pub provider_cpu: Duration,
    /// CPU time of the load generator.
    pub load_cpu: Duration,
    /// Whole calls.
    pub whole: Samples,
    /// Streams: to the first content event.
    pub first_content: Samples,
    /// Streams: between content events.
    pub gaps: Samples,
}

impl Measured {
    /// Calls a second.
    pub fn rate(&self) -> f64 {
        self.calls as f64 / self.elapsed.as_secs_f64()
    }

    /// Microseconds of the proxy's CPU a call; `None` where the kernel's count,
    /// in steps of 10 ms, is too coarse for so little of it.
    pub fn cpu_us(&self) -> Option<f64> {
        let counted = self.proxy_cpu >= Duration::from_millis(100);
        counted.then(|| self.proxy_cpu.as_secs_f64() * 1e6 / self.calls as f64)
    }

    /// Adds another block's samples to these.
    pub fn pool(&mut self, block: &Measured) {
        self.calls += block.calls;
        self.elapsed += block.elapsed;
        self.proxy_cpu += block.proxy_cpu;
        self.provider_cpu += block.provider_cpu;
        self.load_cpu += block.load_cpu;
        self.whole.merge(&block.whole);
        self.first_content.merge(&block.first_content);
        self.gaps.merge(&block.gaps);
    }
}

/// Connects, warms the connections, then measures one block.
pub async fn block(
    bench: &Bench,
    served: &Served,
    workload: Workload,
    connections: usize,
    extent: Extent,
) -> anyhow::Result<Measured> {
    let name = served.target.name();
    let taken_before = bench.numbers.taken();
    let callers = connect(bench, served, workload, connections)
        .await
        .with_context(|| format!("warming {name}"))?;
    let cpu_before = (
        served.cpu()?,
        bench.provider.cpu()?,
        cpu_of(std::process::id())?,
    );
    let mut measured = run(bench, callers, workload, extent)
        .await
        .with_context(|| format!("{} through {name} at {connections}", workload.name()))?;
    served.add_made(bench.numbers.taken() - taken_before);
    measured.proxy_cpu = served.cpu()? - cpu_before.0;
    measured.provider_cpu = bench.provider.cpu()? - cpu_before.1;
    measured.load_cpu = cpu_of(std::process::id())? - cpu_before.2;
    Ok(measured)
}

/// Opens the connections and makes at least 30 calls over them, and one over each.
async fn connect(
    bench: &Bench,
    served: &Served,
    workload: Workload,
    connections: usize,
) -> io::Result<Vec<Caller>> {
    let mut opening = JoinSet::new();
    let rounds = 30_usize.div_ceil(connections);
    for _ in 0..connections {
        let numbers = bench.numbers.clone();
        let address = served.address(workload);
        opening.spawn_local(async move {
            let mut caller = Caller::connect(address, workload, STANDARD_PACE).await?;
            for _ in 0..rounds {
                caller.call(&numbers.next(), Instant::now()).await?;
            }
            io::Result::Ok(caller)
        });
    }
    opening.join_all().await.into_iter().collect()
}

async fn run(
    bench: &Bench,
    callers: Vec<Caller>,
    workload: Workload,
    extent: Extent,
) -> io::Result<Measured> {
    let issued = Rc::new(Cell::new(0));
    let start = Instant::now();
    let mut running = JoinSet::new();
    let connections = u32::try_from(callers.len()).unwrap_or(u32::MAX);
    for (mut caller, place) in callers.into_iter().zip(0..) {
        let numbers = bench.numbers.clone();
        let issued = Rc::clone(&issued);
        running.spawn_local(async move {
            let mut measured = Measured::default();
            if workload.streams() {
                tokio::time::sleep(STREAM_TIME * place / connections).await;
            }
            while issued.get() < extent.calls || start.elapsed() < extent.time {
                issued.set(issued.get() + 1);
                let timing = caller.call(&numbers.next(), Instant::now()).await?;
                measured.calls += 1;
                measured.whole.push(timing.whole);
                timing
                    .first_content
                    .into_iter()
                    .for_each(|time| measured.first_content.push(time));
                timing
                    .gaps
                    .into_iter()
                    .for_each(|time| measured.gaps.push(time));
            }
            io::Result::Ok(measured)
        });
    }
    let parts: Vec<_> = running
        .join_all()
        .await
        .into_iter()
        .collect::<io::Result<_>>()?;
    let elapsed = start.elapsed();
    let mut total = Measured::default();
    parts.iter().for_each(|part| total.pool(part));
    total.elapsed = elapsed;
    Ok(total)
}
