//! Rows of a Parquet file: of its columns only those that say something here are read.

use std::fs::File;
use std::sync::Arc;

use parquet::errors::ParquetError;
use parquet::file::reader::{FileReader as _, SerializedFileReader};
use parquet::record::{Field as Cell, Row as Cells};
use parquet::schema::types::Type;
use serde::Deserialize as _;
use serde_json::{Map, Value};

use super::message::{Field, Row};

/// Hands every row to `visit` with its number, from 1. Damage ends it with that row.
pub(super) fn visit(
    file: File,
    mut visit: impl FnMut(u64, Result<Row<'_>, String>),
) -> Result<(), ParquetError> {
    let reader = SerializedFileReader::new(file)?;
    let schema = reader.metadata().file_metadata().schema();
    // Others can be most of the file: embeddings, moderation scores.
    let fields = schema.get_fields().iter();
    let wanted = fields.filter(|field| Field::named(field.name()) != Field::Other);
    let wanted = Type::group_type_builder(schema.name())
        .with_fields(wanted.map(Arc::clone).collect())
        .build()?;
    if wanted.get_fields().is_empty() {
        return Err(ParquetError::General(
            "it has no column of messages, prompts, roles or contents".to_owned(),
        ));
    }
    for (number, cells) in (1..).zip(reader.get_row_iter(Some(wanted))?) {
        match cells {
            Ok(cells) => {
                let row = Row::deserialize(object(cells));
                visit(number, row.map_err(|error| error.to_string()));
            }
            Err(error) => {
                visit(
                    number,
                    Err(format!("the file is damaged from here on: {error}")),
                );
                break;
            }
        }
    }
    Ok(())
}

fn object(cells: Cells) -> Value {
    let cells = cells.into_columns().into_iter();
    Value::Object(cells.map(|(name, cell)| (name, value(cell))).collect())
}

fn value(cell: Cell) -> Value {
    match cell {
        Cell::Str(text) => Value::String(text),
        Cell::Bytes(bytes) => Value::String(String::from_utf8_lossy(bytes.data()).into_owned()),
        Cell::Bool(value) => value.into(),
        Cell::Byte(value) => value.into(),
        Cell::Short(value) => value.into(),
        Cell::Int(value) => value.into(),
        Cell::Long(value) | Cell::TimestampMillis(value) | Cell::TimestampMicros(value) => {
            value.into()
        }
        Cell::UByte(value) => value.into(),
        Cell::UShort(value) => value.into(),
        Cell::UInt(value) => value.into(),
        Cell::ULong(value) => value.into(),
        Cell::Float(value) => f64::from(value).into(),
        Cell::Double(value) => value.into(),
        Cell::Date(days) => (i64::from(days) * 86_400).into(),
        Cell::Group(cells) => object(cells),
        Cell::ListInternal(list) => {
            Value::Array(list.elements().iter().cloned().map(value).collect())
        }
        Cell::MapInternal(map) => {
            let entries = map.entries().iter().cloned();
            let entries = entries.map(|(name, cell)| (name.to_string(), value(cell)));
            Value::Object(entries.collect::<Map<_, _>>())
        }
        // Neither text nor a time that says which day.
        Cell::Null
        | Cell::Float16(_)
        | Cell::Decimal(_)
        | Cell::TimeMillis(_)
        | Cell::TimeMicros(_) => Value::Null,
    }
}

#[cfg(test)]
mod tests {
    use parquet::basic::Compression;
    use parquet::data_type::{ByteArray, ByteArrayType, DataType, Int64Type};
    use parquet::file::properties::WriterProperties;
    use parquet::file::writer::{SerializedFileWriter, SerializedRowGroupWriter};
    use parquet::schema::parser::parse_message_type;

    use super::super::EachRow;
    use super::super::conversations::read;

    fn column<T: DataType>(
        group: &mut SerializedRowGroupWriter<'_, File>,
        values: &[T::T],
        definitions: Option<&[i16]>,
        repetitions: Option<&[i16]>,
    ) {
        let mut column = group
            .next_column()
            .expect("a writer")
            .expect("a column of the schema");
        column
            .typed::<T>()
            .write_batch(values, definitions, repetitions)
            .expect("values");
        column.close().expect("a column");
    }

    fn texts(texts: &[&str]) -> Vec<ByteArray> {
        texts.iter().map(|text| ByteArray::from(*text)).collect()
    }

    use super::*;

    /// Two conversations in WildChat's shape, of two messages and of one, and a column that is
    /// none of ours.
    #[test]
    fn a_nested_file_is_read() {
        let schema = parse_message_type(
            "message rows {
               required binary model (utf8);
               required int64 timestamp (timestamp_millis);
               required binary embedding;
               required binary hashed_ip (utf8);
               optional group conversation (list) {
                 repeated group list {
                   optional group element {
                     optional binary content (utf8);
                     optional binary role (utf8);
                   }
                 }
               }
             }",
        )
        .expect("a schema");
        for compression in [
            Compression::UNCOMPRESSED,
            Compression::SNAPPY,
            Compression::ZSTD(Default::default()),
        ] {
            let folder = tempfile::tempdir().expect("a folder");
            let path = folder.path().join("rows.parquet");
            let properties = WriterProperties::builder()
                .set_compression(compression)
                .build();
            let mut writer = SerializedFileWriter::new(
                File::create(&path).expect("a file"),
                Arc::new(schema.clone()),
                Arc::new(properties),
            )
            .expect("a writer");
            let mut group = writer.next_row_group().expect("a group");
            column::<ByteArrayType>(&mut group, &texts(&["gpt-4", "gpt-4"]), None, None);
            let begin = 1_680_998_573_000;
            column::<Int64Type>(&mut group, &[begin, begin + 299_000], None, None);
            column::<ByteArrayType>(&mut group, &texts(&["\u{1}", "\u{2}"]), None, None);
            column::<ByteArrayType>(&mut group, &texts(&["ip", "ip"]), None, None);
            let (all, said) = (Some(&[4; 3][..]), Some(&[0, 1, 0][..]));
            column::<ByteArrayType>(&mut group, &texts(&["hi", "hello", "hi"]), all, said);
            let roles = texts(&["user", "assistant", "user"]);
            column::<ByteArrayType>(&mut group, &roles, all, said);
            group.close().expect("a group");
            writer.close().expect("a file");

            let found = read(&path, EachRow::Conversation, 5).expect("rows");
            let windows = &found.repeats.all.windows;
            assert_eq!((found.rows, found.unread), (2, 0), "{compression}");
            assert_eq!(found.repeats.all.calls, 2, "{compression}");
            assert_eq!((windows[0].repeats, windows[0].same_caller), (1, 1));
            assert_eq!(found.repeats.by_model[0].name, "gpt-4");
        }
    }

    #[test]
    fn a_damaged_file_says_so() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("rows.parquet");
        std::fs::write(&path, "PAR1, but that is all").expect("a file");
        let error = read(&path, EachRow::Conversation, 5).expect_err("no Parquet");
        assert!(format!("{error:#}").contains("cannot be read"), "{error:#}");
    }
}
