-- The life of a call to scale, as its microseconds since its coming. NULL in older rows.
ALTER TABLE calls ADD COLUMN sent_us INTEGER;           -- the request went upstream
ALTER TABLE calls ADD COLUMN head_us INTEGER;           -- the upstream's answer began
ALTER TABLE calls ADD COLUMN upstream_ended_us INTEGER; -- the upstream's part was over

-- Totals of each quarter-hour in UTC, which stay when rows go. A quarter-hour is what all time
-- zones' days and hours are made of, so local ones are cut when read.
--
-- Counts calls that have ended, in the quarter-hour in which they came; written in the transaction
-- that writes their rows, so that the sums are the same. Names come from clients: a quarter-hour
-- has a bounded number of groups, and what comes after them counts as model and tool 'other'.
CREATE TABLE rollups (
  quarter        INTEGER NOT NULL, -- quarter-hours since 1970-01-01 UTC
  provider       TEXT NOT NULL,
  model          TEXT NOT NULL,    -- '': the call named none
  tool           TEXT NOT NULL,
  billing        TEXT NOT NULL,
  streaming      INTEGER NOT NULL,
  calls          INTEGER NOT NULL,
  upstream_calls INTEGER NOT NULL,
  -- By dedup label; together they are `calls`.
  miss           INTEGER NOT NULL,
  joined         INTEGER NOT NULL,
  cached         INTEGER NOT NULL,
  off            INTEGER NOT NULL,
  -- By outcome; together they are `calls`.
  completed      INTEGER NOT NULL,
  upstream_error INTEGER NOT NULL,
  timeout        INTEGER NOT NULL,
  broken_stream  INTEGER NOT NULL,
  client_left    INTEGER NOT NULL,
  stopped        INTEGER NOT NULL,
  refused        INTEGER NOT NULL,
  interrupted    INTEGER NOT NULL,
  internal_error INTEGER NOT NULL,
  -- Latencies in microseconds, as `policy/latency_histogram.rs` writes them.
  first_token    BLOB NOT NULL,    -- of calls that had content
  duration       BLOB NOT NULL,    -- of completed calls
  upstream_wait  BLOB NOT NULL,    -- of upstream calls: what their timeout measures
  PRIMARY KEY (quarter, provider, model, tool, billing, streaming)
) WITHOUT ROWID;

-- What was asked and answered, where a person wants that kept. Compressed (zstd), cut at 1 MB each,
-- credentials taken out before.
CREATE TABLE bodies (
  seq               INTEGER PRIMARY KEY,
  id                TEXT NOT NULL UNIQUE, -- of the call
  request_key       BLOB,
  started_us        INTEGER NOT NULL,
  request           BLOB NOT NULL,
  response          BLOB NOT NULL,
  request_cut       INTEGER NOT NULL,     -- 1: it was longer
  response_cut      INTEGER NOT NULL
);

-- A call that shared an answer has its leader's body: the last one with its key.
CREATE INDEX bodies_key ON bodies (request_key, id) WHERE request_key IS NOT NULL;
