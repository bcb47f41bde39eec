-- What a call used and cost, as its provider said or as it was estimated. NULL: not known; in older
-- rows, and for what does not apply. Money is in nano-dollars, billionths of a dollar.
ALTER TABLE calls ADD COLUMN input_tokens INTEGER;          -- fresh: neither cached nor written to it
ALTER TABLE calls ADD COLUMN cached_input_tokens INTEGER;
ALTER TABLE calls ADD COLUMN cache_write_5m_tokens INTEGER;
ALTER TABLE calls ADD COLUMN cache_write_1h_tokens INTEGER;
ALTER TABLE calls ADD COLUMN output_tokens INTEGER;         -- reasoning included
ALTER TABLE calls ADD COLUMN reasoning_tokens INTEGER;
ALTER TABLE calls ADD COLUMN usage_basis TEXT;              -- reported | doubtful | estimated
ALTER TABLE calls ADD COLUMN cost_nanos INTEGER;            -- what it adds to the bill
ALTER TABLE calls ADD COLUMN list_nanos INTEGER;            -- what it is worth by the list
ALTER TABLE calls ADD COLUMN saved_nanos INTEGER;           -- a shared answer's: what it would have cost
-- unpriced: to be paid for, and its model has no price. reported: the provider said the cost.
-- reserved: interrupted, the cost is what was held for it. NULL: by our prices, or nothing to price.
ALTER TABLE calls ADD COLUMN pricing TEXT;
ALTER TABLE calls ADD COLUMN service_tier TEXT;             -- as asked for, where it has its own prices
ALTER TABLE calls ADD COLUMN reserved_nanos INTEGER;        -- held while open; NULL once ended

-- Hold only unpriced calls, so they cost others nothing; a price that is set finds them here, and
-- the call whose answer another one shared.
CREATE INDEX calls_unpriced ON calls (seq) WHERE pricing = 'unpriced';
CREATE INDEX calls_unpriced_shared ON calls (request_key, id)
  WHERE pricing = 'unpriced' AND upstream_call = 1 AND request_key IS NOT NULL;

-- The sums of the same, to the unit.
ALTER TABLE rollups ADD COLUMN input_tokens INTEGER NOT NULL DEFAULT 0;
ALTER TABLE rollups ADD COLUMN cached_input_tokens INTEGER NOT NULL DEFAULT 0;
ALTER TABLE rollups ADD COLUMN cache_write_5m_tokens INTEGER NOT NULL DEFAULT 0;
ALTER TABLE rollups ADD COLUMN cache_write_1h_tokens INTEGER NOT NULL DEFAULT 0;
ALTER TABLE rollups ADD COLUMN output_tokens INTEGER NOT NULL DEFAULT 0;
ALTER TABLE rollups ADD COLUMN reasoning_tokens INTEGER NOT NULL DEFAULT 0;
ALTER TABLE rollups ADD COLUMN cost_nanos INTEGER NOT NULL DEFAULT 0;
ALTER TABLE rollups ADD COLUMN list_nanos INTEGER NOT NULL DEFAULT 0;
ALTER TABLE rollups ADD COLUMN plan_nanos INTEGER NOT NULL DEFAULT 0; -- of `list_nanos`: on a subscription
ALTER TABLE rollups ADD COLUMN saved_nanos INTEGER NOT NULL DEFAULT 0;
ALTER TABLE rollups ADD COLUMN unpriced INTEGER NOT NULL DEFAULT 0;   -- calls whose cost has no price
ALTER TABLE rollups ADD COLUMN estimated INTEGER NOT NULL DEFAULT 0;  -- calls whose tokens are estimated

-- The sums of `rollups` once more, in the two cuts that reports read: `rollups` has a million rows
-- after a year of ten thousand calls a day, these have some twenty thousand each. Written in the
-- same transaction; never put together, never deleted.
CREATE TABLE spend_by_quarter (
  quarter               INTEGER PRIMARY KEY, -- quarter-hours since 1970-01-01 UTC
  calls                 INTEGER NOT NULL,
  input_tokens          INTEGER NOT NULL,
  cached_input_tokens   INTEGER NOT NULL,
  cache_write_5m_tokens INTEGER NOT NULL,
  cache_write_1h_tokens INTEGER NOT NULL,
  output_tokens         INTEGER NOT NULL,
  reasoning_tokens      INTEGER NOT NULL,
  cost_nanos            INTEGER NOT NULL,
  list_nanos            INTEGER NOT NULL,
  plan_nanos            INTEGER NOT NULL,
  saved_nanos           INTEGER NOT NULL,
  unpriced              INTEGER NOT NULL,
  estimated             INTEGER NOT NULL
);
CREATE TABLE spend_by_day (
  day                   INTEGER NOT NULL,    -- days since 1970-01-01 UTC
  provider              TEXT NOT NULL,
  model                 TEXT NOT NULL,
  tool                  TEXT NOT NULL,
  calls                 INTEGER NOT NULL,
  input_tokens          INTEGER NOT NULL,
  cached_input_tokens   INTEGER NOT NULL,
  cache_write_5m_tokens INTEGER NOT NULL,
  cache_write_1h_tokens INTEGER NOT NULL,
  output_tokens         INTEGER NOT NULL,
  reasoning_tokens      INTEGER NOT NULL,
  cost_nanos            INTEGER NOT NULL,
  list_nanos            INTEGER NOT NULL,
  plan_nanos            INTEGER NOT NULL,
  saved_nanos           INTEGER NOT NULL,
  unpriced              INTEGER NOT NULL,
  estimated             INTEGER NOT NULL,
  PRIMARY KEY (day, provider, model, tool)
) WITHOUT ROWID;

-- Calls from before.
INSERT INTO spend_by_quarter
  SELECT quarter, sum(calls), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0 FROM rollups GROUP BY quarter;
INSERT INTO spend_by_day
  SELECT quarter / 96, provider, model, tool, sum(calls), 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0
  FROM rollups GROUP BY quarter / 96, provider, model, tool;
