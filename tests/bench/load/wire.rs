//! HTTP/1.1 by hand over one TCP connection, for both ends of the bench.
//!
//! A full HTTP library in the load generator and the provider would cost as
//! much as the proxies under test and drown the difference between them.

use std::io::{self, ErrorKind};
use std::ops::Range;

use memchr::memmem;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

const READ_AT_ONCE: usize = 16 * 1024;
const LONGEST_HEAD: usize = 64 * 1024;

/// One connection, and what has been read from it but not yet used.
pub struct Wire {
    stream: TcpStream,
    input: Vec<u8>,
    used: usize,
}

/// The head of a request or a response.
#[derive(Debug)]
pub struct Head {
    /// `POST /v1/chat/completions HTTP/1.1` or `HTTP/1.1 200 OK`.
    pub first_line: String,
    /// Whether the sender closes the connection after this message.
    pub close: bool,
    /// How the body that follows is framed.
    pub body: Framing,
}

impl Head {
    /// The status of a response; 0 where the line is not a response's.
    pub fn status(&self) -> u16 {
        let word = self.first_line.split(' ').nth(1);
        word.and_then(|word| word.parse().ok()).unwrap_or(0)
    }
}

/// What of the current body is still to come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Framing {
    /// `content-length`: this many bytes.
    Length(usize),
    /// Chunked, before the size line of the next chunk.
    ChunkSize,
    /// Chunked, inside a chunk with this many bytes left.
    ChunkData(usize),
    /// Chunked, before the line end that closes a chunk or, at last, the body.
    LineEnd {
        /// Whether the body ends here.
        last: bool,
    },
    /// The body is over.
    Done,
}

impl Wire {
    /// Takes over a connected socket and turns Nagle's algorithm off.
    pub fn new(stream: TcpStream) -> io::Result<Self> {
        stream.set_nodelay(true)?;
        Ok(Self {
            stream,
            input: Vec::with_capacity(READ_AT_ONCE),
            used: 0,
        })
    }

    /// Sends `bytes` whole.
    pub async fn send(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.stream.write_all(bytes).await
    }

    /// The next message's head, or `None` if the peer closed between messages.
    pub async fn head(&mut self) -> io::Result<Option<Head>> {
        loop {
            if let Some(end) = memmem::find(self.unused(), b"\r\n\r\n") {
                let head = parse_head(&self.unused()[..end])?;
                self.used += end + 4;
                return Ok(Some(head));
            }
            if self.unused().len() > LONGEST_HEAD {
                return Err(malformed("a head without an end"));
            }
            let idle = self.unused().is_empty();
            if !self.fill().await? {
                return if idle {
                    Ok(None)
                } else {
                    Err(ErrorKind::UnexpectedEof.into())
                };
            }
        }
    }

    /// The next bytes of the body, as they came; `None` once it is over.
    ///
    /// The range points into [`Wire::bytes`] and holds until the next call.
    pub async fn piece(&mut self, left: &mut Framing) -> io::Result<Option<Range<usize>>> {
        loop {
            match *left {
                Framing::Done | Framing::Length(0) => return Ok(None),
                Framing::Length(length) | Framing::ChunkData(length)
                    if !self.unused().is_empty() =>
                {
                    let taken = length.min(self.unused().len());
                    let range = self.used..self.used + taken;
                    self.used += taken;
                    *left = match *left {
                        Framing::Length(_) => Framing::Length(length - taken),
                        _ if taken == length => Framing::LineEnd { last: false },
                        _ => Framing::ChunkData(length - taken),
                    };
                    return Ok(Some(range));
                }
                Framing::ChunkSize => {
                    if let Some(end) = memmem::find(self.unused(), b"\r\n") {
                        let size = parse_chunk_size(&self.unused()[..end])?;
                        self.used += end + 2;
                        *left = match size {
                            0 => Framing::LineEnd { last: true },
                            size => Framing::ChunkData(size),
                        };
                        continue;
                    }
                }
                Framing::LineEnd { last } => {
                    if let Some(line_end) = self.unused().get(..2) {
                        if line_end != b"\r\n" {
                            return Err(malformed("a chunk that does not end where it says"));
                        }
                        self.used += 2;
                        *left = if last {
                            Framing::Done
                        } else {
                            Framing::ChunkSize
                        };
                        continue;
                    }
                }
                Framing::Length(_) | Framing::ChunkData(_) => {}
            }
            if !self.fill().await? {
                return Err(ErrorKind::UnexpectedEof.into());
            }
        }
    }

    /// The buffer that [`Wire::piece`] points into.
    pub fn bytes(&self, range: Range<usize>) -> &[u8] {
        &self.input[range]
    }

    /// Reads the rest of the body into `whole`, which is cleared first.
    pub async fn read_body(&mut self, mut left: Framing, whole: &mut Vec<u8>) -> io::Result<()> {
        whole.clear();
        while let Some(range) = self.piece(&mut left).await? {
            whole.extend_from_slice(&self.input[range]);
        }
        Ok(())
    }

    fn unused(&self) -> &[u8] {
        &self.input[self.used..]
    }

    /// Reads more; `false` at the end of the connection.
    async fn fill(&mut self) -> io::Result<bool> {
        if self.used == self.input.len() {
            self.input.clear();
            self.used = 0;
        } else if self.used > READ_AT_ONCE {
            self.input.drain(..self.used);
            self.used = 0;
        }
        self.input.reserve(READ_AT_ONCE);
        Ok(self.stream.read_buf(&mut self.input).await? > 0)
    }
}

fn parse_head(bytes: &[u8]) -> io::Result<Head> {
    let text = std::str::from_utf8(bytes).map_err(|_| malformed("a head that is not text"))?;
    let mut lines = text.split("\r\n");
    let first_line = lines.next().unwrap_or_default().to_owned();
    let mut close = false;
    let mut body = Framing::Length(0);
    for line in lines {
        let Some((name, value)) = line.split_once(':') else {
            return Err(malformed("a header without a colon"));
        };
        let value = value.trim();
        if name.eq_ignore_ascii_case("content-length") {
            let length = value
                .parse()
                .map_err(|_| malformed("a content-length that is no number"))?;
            body = Framing::Length(length);
        } else if name.eq_ignore_ascii_case("transfer-encoding") {
            body = Framing::ChunkSize;
        } else if name.eq_ignore_ascii_case("connection") {
            close = value.eq_ignore_ascii_case("close");
        }
    }
    Ok(Head {
        first_line,
        close,
        body,
    })
}

fn parse_chunk_size(line: &[u8]) -> io::Result<usize> {
    let digits = line.split(|byte| *byte == b';').next().unwrap_or_default();
    let text =
        std::str::from_utf8(digits).map_err(|_| malformed("a chunk size that is not text"))?;
    usize::from_str_radix(text.trim(), 16).map_err(|_| malformed("a chunk size that is no number"))
}

/// An error about bytes that are not what HTTP/1.1 or the bench promised.
pub fn malformed(what: &'static str) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, what)
}
