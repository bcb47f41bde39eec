//! Draws the README's picture of the overhead bench as SVG.

use std::fmt::Write;

use serde_json::Value;

use crate::calls::Workload;
use crate::overhead::OpenLoop;
use crate::processes::Target;
use crate::report::{Row, median_knee};

const WIDTH: f64 = 960.0;
const PANEL_WIDTH: f64 = 280.0;
const PANEL_GAP: f64 = 30.0;
const LEFT: f64 = 30.0;
const TOP: f64 = 96.0;
const BAR: f64 = 26.0;
const BAR_STEP: f64 = 44.0;
/// The busiest of the standard blocks, where throughput and CPU mean most.
const BUSY: usize = 50;

struct Bar {
    target: Target,
    value: f64,
    label: String,
}

/// The picture, if the run holds chat at 50 connections.
pub fn overhead(machine: &Value, closed: &[Row], open: &[OpenLoop]) -> Option<String> {
    let chat = |connections| {
        let rows = closed.iter();
        rows.filter(move |row| row.workload == Workload::Chat && row.connections == connections)
    };
    chat(BUSY).next()?;
    let cpu = chat(BUSY).filter_map(|row| {
        let value = if row.target == Target::Direct {
            0.0
        } else {
            row.cpu_us?
        };
        Some(Bar {
            target: row.target,
            value,
            label: format!("{value:.0} µs"),
        })
    });
    let alone = chat(1).map(|row| {
        let micros = row.p50 * 1000.0;
        Bar {
            target: row.target,
            value: micros,
            label: format!("{micros:.0} µs"),
        }
    });
    let (third_title, third): (_, Vec<Bar>) = if open.is_empty() {
        let title = format!("calls a second, {BUSY} connections");
        let bars = chat(BUSY).map(|row| rate_bar(row.target, row.rate));
        (title, bars.collect())
    } else {
        let bars = open
            .iter()
            .map(|open| rate_bar(open.target, median_knee(open)));
        ("calls a second before p99 rises".to_owned(), bars.collect())
    };
    let panels = [
        (
            format!("CPU a call, {BUSY} connections"),
            "less is better",
            cpu.collect(),
        ),
        (
            "one call alone, median".to_owned(),
            "less is better",
            alone.collect(),
        ),
        (third_title, "more is better", third),
    ];
    let rows = panels
        .iter()
        .map(|(_, _, bars)| bars.len())
        .max()
        .unwrap_or(0);
    let mut svg = opening(machine, TOP + rows as f64 * BAR_STEP + 34.0);
    for (index, (title, hint, bars)) in panels.iter().enumerate() {
        panel(
            &mut svg,
            LEFT + index as f64 * (PANEL_WIDTH + PANEL_GAP),
            title,
            hint,
            bars,
        );
    }
    svg.push_str("</svg>\n");
    Some(svg)
}

fn rate_bar(target: Target, rate: f64) -> Bar {
    let thousands = rate / 1000.0;
    Bar {
        target,
        value: rate,
        label: format!("{thousands:.1} k"),
    }
}

fn opening(machine: &Value, height: f64) -> String {
    let cpu = machine["cpu"].as_str().unwrap_or("unknown");
    let cores = &machine["cores"];
    let commit: String = machine["commit"]
        .as_str()
        .unwrap_or("unknown")
        .chars()
        .take(10)
        .collect();
    let source = format!(
        "scripts/bench overhead on {cpu}, {cores} cores shared by load, proxy and provider; commit {commit}"
    );
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" width=\"{WIDTH}\" \
         height=\"{height}\" role=\"img\" aria-label=\"What a call through Traygate costs\" \
         font-family=\"system-ui, -apple-system, 'Segoe UI', sans-serif\">\n\
         <rect width=\"100%\" height=\"100%\" rx=\"8\" fill=\"#ffffff\"/>\n\
         <text x=\"{LEFT}\" y=\"36\" font-size=\"18\" font-weight=\"600\" fill=\"#1a1d21\">What a call through Traygate costs</text>\n\
         <text x=\"{LEFT}\" y=\"{}\" font-size=\"11\" fill=\"#6b7280\">{}</text>\n",
        height - 14.0,
        escaped(&source)
    )
}

fn panel(svg: &mut String, left: f64, title: &str, hint: &str, bars: &[Bar]) {
    let most = bars
        .iter()
        .map(|bar| bar.value)
        .fold(f64::MIN_POSITIVE, f64::max);
    let _ = writeln!(
        svg,
        "<text x=\"{left}\" y=\"66\" font-size=\"13\" font-weight=\"600\" fill=\"#1a1d21\">{}</text>\n\
         <text x=\"{left}\" y=\"82\" font-size=\"11\" fill=\"#6b7280\">{hint}</text>",
        escaped(title)
    );
    for (index, bar) in bars.iter().enumerate() {
        let top = TOP + index as f64 * BAR_STEP;
        // Room for the label behind the longest bar.
        let width = (bar.value / most * (PANEL_WIDTH - 60.0)).max(1.0);
        let colour = colour(bar.target);
        let weight = if bar.target == Target::Traygate {
            "600"
        } else {
            "400"
        };
        let _ = writeln!(
            svg,
            "<text x=\"{left}\" y=\"{:.1}\" font-size=\"11\" font-weight=\"{weight}\" fill=\"#374151\">{}</text>\n\
             <rect x=\"{left}\" y=\"{:.1}\" width=\"{width:.1}\" height=\"{}\" rx=\"3\" fill=\"{colour}\"/>\n\
             <text x=\"{:.1}\" y=\"{:.1}\" font-size=\"12\" font-weight=\"{weight}\" fill=\"#1a1d21\">{}</text>",
            top + 10.0,
            title_of(bar.target),
            top + 14.0,
            BAR - 6.0,
            left + width + 6.0,
            top + 28.0,
            escaped(&bar.label)
        );
    }
}

fn title_of(target: Target) -> &'static str {
    match target {
        Target::Direct => "no proxy",
        Target::Nginx => "nginx, plain reverse proxy",
        Target::Forwarder => "axum + reqwest, nothing between",
        Target::Traygate => "Traygate, everything on",
    }
}

fn colour(target: Target) -> &'static str {
    match target {
        Target::Direct => "#d1d5db",
        Target::Nginx => "#9ca3af",
        Target::Forwarder => "#93b4d8",
        Target::Traygate => "#2563eb",
    }
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
}
