//! A provider that answers at once, or streams at a fixed pace.

use std::io::{self, ErrorKind};
use std::time::{Duration, Instant};

use tokio::net::{TcpListener, TcpStream};

use crate::alarm::Alarm;
use crate::calls::{
    Asked, Workload, closing_events, content_event, json_answer, role_event, stamped_event,
};
use crate::chunks::monotonic_nanos;
use crate::wire::Wire;

/// Serves until the process ends.
pub async fn serve(listener: TcpListener) -> io::Result<()> {
    loop {
        let (stream, _) = listener.accept().await?;
        tokio::spawn(async move {
            if let Err(error) = converse(stream).await
                && !is_departure(&error)
            {
                eprintln!("provider: {error}");
            }
        });
    }
}

fn is_departure(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        ErrorKind::ConnectionReset | ErrorKind::BrokenPipe
    )
}

async fn converse(stream: TcpStream) -> io::Result<()> {
    let mut wire = Wire::new(stream)?;
    let mut body = Vec::new();
    while let Some(head) = wire.head().await? {
        wire.read_body(head.body, &mut body).await?;
        match Asked::read(&body) {
            Some(asked) if asked.workload.streams() => stream_answer(&mut wire, &asked).await?,
            Some(asked) => {
                send_json(&mut wire, &json_answer(asked.workload, &asked.number)).await?
            }
            // A free GET: a proxy that looks whether anybody is there.
            None => send_json(&mut wire, r#"{"object":"list","data":[]}"#).await?,
        }
        if head.close {
            break;
        }
    }
    Ok(())
}

async fn send_json(wire: &mut Wire, body: &str) -> io::Result<()> {
    let length = body.len();
    let answer = format!(
        "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nx-request-id: req_bench\r\n\
         content-length: {length}\r\n\r\n{body}"
    );
    wire.send(answer.as_bytes()).await
}

async fn stream_answer(wire: &mut Wire, asked: &Asked) -> io::Result<()> {
    let number = &asked.number;
    let gap = Duration::from_millis(asked.pace.gap_ms.into());
    let alarm = Alarm::new()?;
    let start = Instant::now();
    let opening = format!(
        "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nx-request-id: req_bench\r\n\
         transfer-encoding: chunked\r\n\r\n{}",
        chunk(&role_event(number))
    );
    wire.send(opening.as_bytes()).await?;
    for index in 0..asked.pace.events {
        alarm.until(start + gap * index).await?;
        let event = match asked.workload {
            Workload::Stamped => stamped_event(number, monotonic_nanos()),
            _ => content_event(number, index),
        };
        wire.send(chunk(&event).as_bytes()).await?;
    }
    let closing = chunk(&closing_events(number, asked.usage)) + "0\r\n\r\n";
    wire.send(closing.as_bytes()).await
}

fn chunk(data: &str) -> String {
    format!("{:x}\r\n{data}\r\n", data.len())
}
