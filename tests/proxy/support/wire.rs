//! Reads and writes HTTP/1.1 on a socket without tidying anything up.

use std::io;
use std::sync::Arc;

use bytes::{Buf, Bytes, BytesMut};
use tokio::net::TcpStream;

/// Header lines as they came: their order, case, spacing and repeats.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Headers(Vec<String>);

impl Headers {
    /// `Name: value`, each as it came, without its line end.
    pub fn lines(&self) -> &[String] {
        &self.0
    }

    /// The value of the first header of this name, in any case.
    pub fn get(&self, name: &str) -> Option<&str> {
        self.all(name).next()
    }

    /// The values of all headers of this name, in any case.
    pub fn all(&self, name: &str) -> impl Iterator<Item = &str> {
        self.0
            .iter()
            .filter_map(|line| line.split_once(':'))
            .filter(move |(found, _)| found.eq_ignore_ascii_case(name))
            .map(|(_, value)| value.trim())
    }

    /// Whether the list in this header has the word: `connection: close, te` has `te`.
    pub fn has(&self, name: &str, word: &str) -> bool {
        self.all(name)
            .flat_map(|list| list.split(','))
            .any(|item| item.trim().eq_ignore_ascii_case(word))
    }
}

/// The start line and the headers of a message.
#[derive(Clone, Debug)]
pub struct RawHead {
    pub start: String,
    pub headers: Headers,
}

/// How a body came to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BodyEnd {
    /// As its framing says: all of `content-length`, the last chunk, or a close where that is
    /// the end.
    Clean,
    /// The connection was closed before.
    Aborted,
    /// The connection was reset before (TCP RST).
    Reset,
}

/// How the rest of a body is to be found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Framing {
    /// So many bytes are still to come.
    Length(u64),
    Chunked,
    UntilClose,
    Over(BodyEnd),
}

impl Framing {
    /// What the headers say; `otherwise` if they say nothing.
    ///
    /// # Panics
    /// On a `content-length` that is no number.
    pub fn of(headers: &Headers, otherwise: Framing) -> Framing {
        if headers.has("transfer-encoding", "chunked") {
            return Framing::Chunked;
        }
        match headers.get("content-length") {
            Some("0") => Framing::Over(BodyEnd::Clean),
            Some(length) => match length.parse() {
                Ok(length) => Framing::Length(length),
                Err(_) => panic!("content-length: {length}"),
            },
            None => otherwise,
        }
    }
}

/// A socket with what was read from it and not yet used. Reading and writing need no split, so
/// that one task can do both.
#[derive(Debug)]
pub struct Wire {
    socket: Arc<TcpStream>,
    buffer: BytesMut,
    /// The trailer lines of the last chunked body.
    pub trailers: Headers,
}

impl Wire {
    pub fn new(socket: TcpStream) -> Wire {
        Wire {
            socket: Arc::new(socket),
            buffer: BytesMut::new(),
            trailers: Headers::default(),
        }
    }

    /// For writing while this is being read.
    pub fn socket(&self) -> Arc<TcpStream> {
        Arc::clone(&self.socket)
    }

    /// Reads more into the buffer; `Ok(0)` at the end.
    ///
    /// Cancel safe.
    pub async fn fill(&mut self) -> io::Result<usize> {
        loop {
            self.socket.readable().await?;
            self.buffer.reserve(16 << 10);
            match self.socket.try_read_buf(&mut self.buffer) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                read => return read,
            }
        }
    }

    /// All that was read and not used, and at least one byte unless the peer closed.
    pub async fn raw(&mut self) -> io::Result<Bytes> {
        if self.buffer.is_empty() {
            self.fill().await?;
        }
        Ok(self.buffer.split().freeze())
    }

    /// The next line without its CRLF or LF; `None` if the peer closed before its end.
    async fn line(&mut self) -> io::Result<Option<String>> {
        let mut searched = 0;
        loop {
            if let Some(at) = self.buffer[searched..]
                .iter()
                .position(|byte| *byte == b'\n')
            {
                let line = self.buffer.split_to(searched + at + 1);
                let line = line.strip_suffix(b"\n").unwrap_or(&line);
                let line = line.strip_suffix(b"\r").unwrap_or(line);
                // Latin-1: each byte is a character, nothing is lost.
                return Ok(Some(line.iter().copied().map(char::from).collect()));
            }
            searched = self.buffer.len();
            if self.fill().await? == 0 {
                return Ok(None);
            }
        }
    }

    async fn header_lines(&mut self) -> io::Result<Option<Headers>> {
        let mut lines = Vec::new();
        loop {
            match self.line().await? {
                None => return Ok(None),
                Some(line) if line.is_empty() => return Ok(Some(Headers(lines))),
                Some(line) => lines.push(line),
            }
        }
    }

    /// The next head; `None` if the peer closed before its end.
    pub async fn head(&mut self) -> io::Result<Option<RawHead>> {
        let Some(start) = self.line().await? else {
            return Ok(None);
        };
        Ok(self
            .header_lines()
            .await?
            .map(|headers| RawHead { start, headers }))
    }

    /// The next piece of a body: a whole chunk where it is chunked (the part that came of one that
    /// was cut), else what came at once. `None` at the end, which `framing` then tells.
    pub async fn piece(&mut self, framing: &mut Framing) -> Option<Bytes> {
        let piece = match *framing {
            Framing::Over(_) => return None,
            Framing::Length(left) => self.counted(left, framing).await,
            Framing::Chunked => self.chunk(framing).await,
            Framing::UntilClose => match self.raw().await {
                Ok(bytes) if bytes.is_empty() => {
                    *framing = Framing::Over(BodyEnd::Clean);
                    Ok(None)
                }
                read => read.map(Some),
            },
        };
        piece.unwrap_or_else(|_| {
            // Any error of a loopback socket is a reset by the peer.
            *framing = Framing::Over(BodyEnd::Reset);
            None
        })
    }

    async fn counted(&mut self, left: u64, framing: &mut Framing) -> io::Result<Option<Bytes>> {
        if self.buffer.is_empty() && self.fill().await? == 0 {
            *framing = Framing::Over(BodyEnd::Aborted);
            return Ok(None);
        }
        let here = usize::try_from(left)
            .unwrap_or(usize::MAX)
            .min(self.buffer.len());
        *framing = match left - here as u64 {
            0 => Framing::Over(BodyEnd::Clean),
            left => Framing::Length(left),
        };
        Ok(Some(self.buffer.split_to(here).freeze()))
    }

    async fn chunk(&mut self, framing: &mut Framing) -> io::Result<Option<Bytes>> {
        let Some(line) = self.line().await? else {
            self.buffer.clear();
            *framing = Framing::Over(BodyEnd::Aborted);
            return Ok(None);
        };
        let digits = line.split(';').next().unwrap_or_default().trim();
        let Ok(size) = usize::from_str_radix(digits, 16) else {
            panic!("no chunk size: {line:?}");
        };
        if size == 0 {
            let trailers = self.header_lines().await?;
            *framing = Framing::Over(match trailers {
                Some(_) => BodyEnd::Clean,
                None => BodyEnd::Aborted,
            });
            self.trailers = trailers.unwrap_or_default();
            return Ok(None);
        }
        while self.buffer.len() < size + 2 {
            let end = match self.fill().await {
                Ok(0) => BodyEnd::Aborted,
                Ok(_) => continue,
                Err(_) => BodyEnd::Reset,
            };
            *framing = Framing::Over(end);
            let mut rest = self.buffer.split().freeze();
            rest.truncate(size);
            return Ok((!rest.is_empty()).then_some(rest));
        }
        let chunk = self.buffer.split_to(size).freeze();
        assert!(
            self.buffer.starts_with(b"\r\n"),
            "a chunk of {size} bytes has no line end"
        );
        self.buffer.advance(2);
        Ok(Some(chunk))
    }
}

/// Writes all of it.
pub async fn write(socket: &TcpStream, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        socket.writable().await?;
        match socket.try_write(bytes) {
            Ok(written) => bytes = &bytes[written..],
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// One chunk of a chunked body.
pub fn framed_chunk(bytes: &[u8]) -> Vec<u8> {
    let mut chunk = format!("{:x}\r\n", bytes.len()).into_bytes();
    chunk.extend_from_slice(bytes);
    chunk.extend_from_slice(b"\r\n");
    chunk
}

/// The end of a chunked body, without trailers.
pub const LAST_CHUNK: &[u8] = b"0\r\n\r\n";

/// Sends an end of stream (FIN); reading goes on.
pub fn finish_sending(socket: &TcpStream) {
    // The peer may be gone already, which is as good.
    let _ = socket2::SockRef::from(socket).shutdown(std::net::Shutdown::Write);
}

/// Makes the close that follows a reset (TCP RST) instead of an orderly end.
pub fn reset_on_close(socket: &TcpStream) -> io::Result<()> {
    socket2::SockRef::from(socket).set_linger(Some(std::time::Duration::ZERO))
}
