//! Decodes compressed bodies, on a copy and bounded.

use std::io::{self, Write};

use brotli_decompressor::DecompressorWriter;
use flate2::write::MultiGzDecoder;
use flate2::{Decompress, FlushDecompress, Status};
use zstd::stream::raw::{DParameter, Decoder as ZstdDecoder};
use zstd::stream::zio;

/// How a body is compressed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Encoding {
    #[default]
    Identity,
    Gzip,
    /// The zlib format, or the bare deflate that some servers send under this name.
    Deflate,
    Brotli,
    Zstd,
    /// One that is not known here, or several on top of each other.
    Unknown,
}

impl Encoding {
    /// Reads a `content-encoding` header; empty if there is none.
    pub fn of(content_encoding: &str) -> Self {
        let name = content_encoding.trim();
        let is = |known: &str| name.eq_ignore_ascii_case(known);
        if name.is_empty() || is("identity") {
            Self::Identity
        } else if is("gzip") || is("x-gzip") {
            Self::Gzip
        } else if is("deflate") {
            Self::Deflate
        } else if is("br") {
            Self::Brotli
        } else if is("zstd") {
            Self::Zstd
        } else {
            Self::Unknown
        }
    }
}

/// Why a request body could not be decoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    /// Not what its `content-encoding` says, or not all of it.
    #[error("the body is not valid in its content-encoding")]
    Corrupt,
    /// It decodes to more than the limit.
    #[error("the body decodes to more than is allowed")]
    TooLarge,
    #[error("the content-encoding is not known")]
    Unsupported,
}

/// Decodes a request body whole, to at most `limit` bytes.
///
/// Stops as soon as the limit is passed, so a small body that would grow to
/// gigabytes costs no more than one that grows to the limit.
pub fn decode_request(
    encoding: Encoding,
    body: &[u8],
    limit: usize,
) -> Result<Vec<u8>, DecodeError> {
    let sink = Bounded {
        bytes: Vec::new(),
        limit,
        overflowed: false,
    };
    let mut decoder = match Decoder::new(encoding, sink) {
        Ok(decoder) => decoder,
        Err(mut sink) if encoding == Encoding::Identity => {
            sink.write_all(body).map_err(|_| DecodeError::TooLarge)?;
            return Ok(sink.bytes);
        }
        Err(_) => return Err(DecodeError::Unsupported),
    };
    let decoded = decoder.write(body).and_then(|()| decoder.end());
    let sink = decoder.sink_mut();
    match decoded {
        _ if sink.overflowed => Err(DecodeError::TooLarge),
        Ok(()) => Ok(std::mem::take(&mut sink.bytes)),
        Err(_) => Err(DecodeError::Corrupt),
    }
}

/// Decodes the beginning of a body, as far as it goes and to at most `limit` bytes; and whether
/// that is all of it.
pub fn decode_beginning(encoding: Encoding, body: &[u8], limit: usize) -> (Vec<u8>, bool) {
    let sink = Bounded {
        bytes: Vec::new(),
        limit,
        overflowed: false,
    };
    let Ok(mut decoder) = Decoder::new(encoding, sink) else {
        return (Vec::new(), false);
    };
    // In small steps, so that what was decoded before a fault or the limit is there.
    let decoded = body.chunks(BUFFER).try_for_each(|part| decoder.write(part));
    let is_whole = decoded.and_then(|()| decoder.end()).is_ok();
    let sink = decoder.sink_mut();
    (std::mem::take(&mut sink.bytes), is_whole)
}

struct Bounded {
    bytes: Vec<u8>,
    limit: usize,
    overflowed: bool,
}

impl Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        // Decoders may offer what an error left behind once more, when they are dropped.
        if self.overflowed {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        let room = self.limit - self.bytes.len();
        if bytes.len() > room {
            self.overflowed = true;
            self.bytes.extend_from_slice(&bytes[..room]);
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        self.bytes.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Hands the decoded bytes of what is written to it on to `W`, at once.
pub(super) struct Decoder<W: Write> {
    format: Format<W>,
    /// An empty body is valid in every encoding: a 204, the answer to a HEAD.
    started: bool,
}

enum Format<W: Write> {
    Gzip(MultiGzDecoder<W>),
    Deflate(Inflate<W>),
    Brotli(Box<DecompressorWriter<W>>),
    Zstd(zio::Writer<W, ZstdDecoder<'static>>),
}

/// RFC 9659: a zstd body on the web needs a window of at most 8 MB.
const ZSTD_WINDOW_LOG: u32 = 23;
const BUFFER: usize = 16 * 1024;

impl<W: Write> Decoder<W> {
    /// Gives the sink back where nothing is to be decoded, or nothing can be.
    pub(super) fn new(encoding: Encoding, sink: W) -> Result<Self, W> {
        let format = match encoding {
            Encoding::Identity | Encoding::Unknown => return Err(sink),
            Encoding::Gzip => Format::Gzip(MultiGzDecoder::new(sink)),
            Encoding::Deflate => Format::Deflate(Inflate::new(sink)),
            Encoding::Brotli => Format::Brotli(Box::new(DecompressorWriter::new(sink, BUFFER))),
            Encoding::Zstd => {
                let bounded = ZstdDecoder::new().and_then(|mut decoder| {
                    decoder.set_parameter(DParameter::WindowLogMax(ZSTD_WINDOW_LOG))?;
                    Ok(decoder)
                });
                match bounded {
                    Ok(decoder) => {
                        Format::Zstd(zio::Writer::new_with_capacity(sink, decoder, BUFFER))
                    }
                    Err(_) => return Err(sink),
                }
            }
        };
        Ok(Self {
            format,
            started: false,
        })
    }

    pub(super) fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        if bytes.is_empty() {
            return Ok(());
        }
        self.started = true;
        let decoder: &mut dyn Write = match &mut self.format {
            Format::Gzip(decoder) => decoder,
            Format::Deflate(decoder) => return decoder.write(bytes),
            Format::Brotli(decoder) => decoder,
            Format::Zstd(decoder) => decoder,
        };
        decoder.write_all(bytes)?;
        // They keep the last of it back until then.
        decoder.flush()
    }

    /// The body has ended; an error if that is too early, or its checksum is wrong.
    pub(super) fn end(&mut self) -> io::Result<()> {
        if !self.started {
            return Ok(());
        }
        match &mut self.format {
            Format::Gzip(decoder) => decoder.try_finish(),
            Format::Deflate(decoder) => decoder.end(),
            Format::Brotli(decoder) => decoder.close(),
            Format::Zstd(decoder) => decoder.finish(),
        }
    }

    pub(super) fn sink(&self) -> &W {
        match &self.format {
            Format::Gzip(decoder) => decoder.get_ref(),
            Format::Deflate(decoder) => &decoder.sink,
            Format::Brotli(decoder) => decoder.get_ref(),
            Format::Zstd(decoder) => decoder.writer(),
        }
    }

    pub(super) fn sink_mut(&mut self) -> &mut W {
        match &mut self.format {
            Format::Gzip(decoder) => decoder.get_mut(),
            Format::Deflate(decoder) => &mut decoder.sink,
            Format::Brotli(decoder) => decoder.get_mut(),
            Format::Zstd(decoder) => decoder.writer_mut(),
        }
    }
}

/// `deflate`: the format shows in the first byte only, and a missing end has to be noticed;
/// flate2's own writers do neither.
struct Inflate<W> {
    sink: W,
    state: Option<Decompress>,
    buffer: Box<[u8]>,
    ended: bool,
}

impl<W: Write> Inflate<W> {
    fn new(sink: W) -> Self {
        Self {
            sink,
            state: None,
            buffer: vec![0; BUFFER].into(),
            ended: false,
        }
    }

    fn write(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        // RFC 1950: the low half of zlib's first byte is 8. A bare deflate stream cannot
        // begin so: it would be a stored block with its padding bits set.
        let state = self
            .state
            .get_or_insert_with(|| Decompress::new(bytes.first().is_some_and(|b| b & 0x0f == 8)));
        while !self.ended {
            let (read, written) = (state.total_in(), state.total_out());
            let status = state.decompress(bytes, &mut self.buffer, FlushDecompress::None)?;
            let read = (state.total_in() - read) as usize;
            let written = (state.total_out() - written) as usize;
            bytes = &bytes[read..];
            self.sink.write_all(&self.buffer[..written])?;
            self.ended = status == Status::StreamEnd;
            // A full buffer may mean that more is waiting, without any more input.
            if bytes.is_empty() && written < self.buffer.len() || read == 0 && written == 0 {
                break;
            }
        }
        Ok(())
    }

    fn end(&self) -> io::Result<()> {
        if self.ended {
            Ok(())
        } else {
            Err(io::ErrorKind::UnexpectedEof.into())
        }
    }
}
