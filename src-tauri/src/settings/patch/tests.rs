use proptest::prelude::*;
use serde_json::json;

use super::*;
use crate::settings::{DEFAULT_FILE, Overrides, Settings};

fn laid(text: &str, patch: Json) -> String {
    lay_on(text, &patch).unwrap_or_else(|unfit| panic!("{patch}: {unfit:?}"))
}

#[test]
fn a_default_is_uncommented_where_it_stands_and_null_puts_it_back_byte_for_byte() {
    let openai = "#[[provider]]\n#name = \"openai\"\n#kind = \"openai\"\n\
                  #base_url = \"https://api.openai.com/v1\"\n";
    let ollama = "#[[provider]]\n#name = \"ollama\"\n#kind = \"ollama\"\n\
                  #base_url = \"http://localhost:11434\"\n#key = \"auto\"\n#default = false\n\
                  #local = true\n#concurrency = 4\n";
    for (patch, undo, before, after) in [
        (
            json!({"limits": {"timeout_secs": 60}}),
            json!({"limits": {"timeout_secs": null}}),
            "\n#timeout_secs = 120\n",
            "\ntimeout_secs = 60\n",
        ),
        (
            json!({"server": {"host": ["172.17.0.1"]}}),
            json!({"server": {"host": null}}),
            "#host = []\n",
            "host = [\"172.17.0.1\"]\n",
        ),
        (
            json!({"provider": {"openai": {"base_url": "http://h/v1"}}}),
            json!({"provider": {"openai": null}}),
            openai,
            "[[provider]]\nname = \"openai\"\n#kind = \"openai\"\n\
             base_url = \"http://h/v1\"\n",
        ),
        (
            json!({"provider": {"ollama": {"concurrency": 8, "failures": 2}}}),
            json!({"provider": {"ollama": null}}),
            ollama,
            "[[provider]]\nname = \"ollama\"\n#kind = \"ollama\"\n\
             #base_url = \"http://localhost:11434\"\n#key = \"auto\"\n#default = false\n\
             #local = true\nconcurrency = 8\nfailures = 2\n",
        ),
        (
            json!({"dedup": {"rule": [{"tool": "eval-*", "mode": "off"}]}}),
            json!({"dedup": {"rule": null}}),
            "#   mode = \"off\"\n",
            "#   mode = \"off\"\n\n[[dedup.rule]]\nmode = \"off\"\ntool = \"eval-*\"\n",
        ),
        (
            json!({"route": [{"model": "gpt-*", "provider": "openai"}]}),
            json!({"route": []}),
            "#   provider = \"openai\"\n",
            "#   provider = \"openai\"\n\n[[route]]\nmodel = \"gpt-*\"\nprovider = \"openai\"\n",
        ),
        (
            json!({"provider": {"mine": {"kind": "openai", "base_url": "http://h", "queue": 2}}}),
            json!({"provider": {"mine": null}}),
            "\n# Which provider a model's",
            "\n[[provider]]\nname = \"mine\"\nkind = \"openai\"\nbase_url = \"http://h\"\n\
             queue = 2\n\n# Which provider a model's",
        ),
    ] {
        assert!(DEFAULT_FILE.contains(before), "{before}");
        let patched = laid(DEFAULT_FILE, patch.clone());
        similar(&patched, &DEFAULT_FILE.replacen(before, after, 1));
        assert!(Settings::parse(&patched, &Overrides::default()).is_ok());
        similar(&laid(&patched, undo), DEFAULT_FILE);
    }
}

/// Equal byte for byte; shows the first line that is not.
fn similar(found: &str, expected: &str) {
    for (number, (found, expected)) in found.lines().zip(expected.lines()).enumerate() {
        assert_eq!(found, expected, "line {}", number + 1);
    }
    assert_eq!(found, expected);
}

#[test]
fn everything_else_keeps_its_bytes() {
    let table = [
        // A live value; the comment after it and the spaces around it.
        (
            "[limits]\n  queue   =  1   # mine\n",
            json!({"limits": {"queue": 2}}),
            "[limits]\n  queue   =  2   # mine\n",
        ),
        // No end of line at the end; a comment that is no default.
        (
            "[limits] # a\nqueue = 1 # b",
            json!({"limits": {"concurrency": 2}}),
            "[limits] # a\nqueue = 1 # b\nconcurrency = 2",
        ),
        (
            "# top\r\n[limits]\r\n#queue = 1000 # why\r\n",
            json!({"limits": {"queue": 5}}),
            "# top\r\n[limits]\r\nqueue = 5 # why\r\n",
        ),
        (
            "# only this",
            json!({"server": {"port": 1}}),
            "# only this\n\n[server]\nport = 1\n",
        ),
        ("", json!({"server": {"port": 1}}), "[server]\nport = 1\n"),
        // Other forms of the same.
        (
            "limits.queue = 1 # a\nlimits.idle_secs = 3\n",
            json!({"limits": {"queue": 2, "idle_secs": null}}),
            "limits.queue = 2 # a\n",
        ),
        (
            "limits = { queue = 1 } # a\n",
            json!({"limits": {"queue": 2, "concurrency": 3}}),
            "limits = { queue = 2 , concurrency = 3 } # a\n",
        ),
        // Something that only looks like a setting that is commented out.
        (
            "[server]\nplaceholder_keys = [\"\"\"\n#port = 7337\n\"\"\"]\n",
            json!({"server": {"port": 1}}),
            "[server]\nplaceholder_keys = [\"\"\"\n#port = 7337\n\"\"\"]\nport = 1\n",
        ),
        // The next section's is not this one's.
        (
            "[limits]\n[dedup]\n#max_mb = 128\n[log]\n#max_mb = 500\n",
            json!({"log": {"max_mb": 20}}),
            "[limits]\n[dedup]\n#max_mb = 128\n[log]\nmax_mb = 20\n",
        ),
        // Comments inside a list stay with what stays.
        (
            "[dedup]\nretry_tools = [\n  \"a\", # first\n  \"b\", # second\n]\n",
            json!({"dedup": {"retry_tools": ["a", "c"]}}),
            "[dedup]\nretry_tools = [\n  \"a\", # first\n    \"c\", # second\n]\n",
        ),
        (
            "[dedup]\nretry_tools = [\n  \"a\", # first\n]\n",
            json!({"dedup": {"retry_tools": null}}),
            "[dedup]\n#retry_tools = [\n#  \"a\", # first\n#]\n",
        ),
        // One of a list goes, its comments stay; the others are not touched.
        (
            "[[route]]\nmodel = \"a\"\nprovider = \"openai\"\n\n# mine\n[[route]]\nmodel = \"b\" # b\nprovider = \"ollama\"\n",
            json!({"route": [{"model": "a", "provider": "openai"}]}),
            "[[route]]\nmodel = \"a\"\nprovider = \"openai\"\n\n# mine\n# b\n",
        ),
        (
            "[[route]]\nmodel = \"a\" # a\nprovider = \"openai\"\n",
            json!({"route": [{"model": "a", "provider": "demo"}]}),
            "[[route]]\nmodel = \"a\" # a\nprovider = \"demo\"\n",
        ),
        // Headers in both forms.
        (
            "[[provider]]\nname = \"openai\"\nheaders = { a = \"1\" }\n",
            json!({"provider": {"openai": {"headers": {"a": null, "b": "2"}}}}),
            "[[provider]]\nname = \"openai\"\nheaders = { b = \"2\" }\n",
        ),
        (
            "[[provider]]\nname = \"openai\"\n[provider.headers]\na = \"1\" # a\n",
            json!({"provider": {"openai": {"headers": {"a": "3", "b": "2"}, "queue": 1}}}),
            "[[provider]]\nname = \"openai\"\nqueue = 1\n[provider.headers]\na = \"3\" # a\nb = \"2\"\n",
        ),
        (
            "route = [{ model = \"a\", provider = \"demo\" }] # all\n",
            json!({"route": [{"model": "a", "provider": "demo"}, {"model": "b", "provider": "demo"}]}),
            "route = [{ model = \"a\", provider = \"demo\" }, { model = \"b\", provider = \"demo\" }] # all\n",
        ),
    ];
    for (text, patch, expected) in table {
        assert_eq!(laid(text, patch.clone()), expected, "{text:?} {patch}");
    }
}

#[test]
fn a_header_never_takes_settings_that_stood_below_it() {
    // A person has put live settings of [spend] below the commented providers.
    let text = "[spend]\n#[[provider]]\n#name = \"openai\"\n\nwarn_at = 0.5\n";
    let patched = laid(text, json!({"provider": {"openai": {"queue": 3}}}));
    assert_eq!(
        patched,
        format!("{text}\n[[provider]]\nname = \"openai\"\nqueue = 3\n")
    );
}

#[test]
fn what_is_no_patch_is_refused_by_its_field() {
    for (patch, field) in [
        (json!([]), ""),
        (json!("x"), ""),
        (json!({"limits": 3}), "limits"),
        (json!({"provider": [{"name": "openai"}]}), "provider"),
        (json!({"provider": null}), "provider"),
        (
            json!({"provider": {"openai": {"name": "other"}}}),
            "provider.openai.name",
        ),
        (json!({"route": {"model": "x"}}), "route"),
        (json!({"route": [1]}), "route"),
        (json!({"server": {"host": [null]}}), "server.host"),
    ] {
        match lay_on(DEFAULT_FILE, &patch) {
            Err(Unfit::Patch { field: at, .. }) => assert_eq!(at, field, "{patch}"),
            other => panic!("{patch}: {other:?}"),
        }
    }
}

#[test]
fn numbers_have_one_kind_and_no_exponent() {
    for (given, written) in [
        (json!(8.0), "8"),
        (json!(0.5), "0.5"),
        (json!(1e-7), "0.0000001"),
        (json!(-3), "-3"),
        (json!(9007199254740991_i64), "9007199254740991"),
    ] {
        let patched = laid("", json!({"spend": {"warn_at": given}}));
        assert_eq!(patched, format!("[spend]\nwarn_at = {written}\n"));
    }
}

#[test]
fn the_changes_are_named_as_a_patch_names_them() {
    let before = "[limits]\nqueue = 1\n[[provider]]\nname = \"openai\"\nqueue = 2\n";
    let after =
        "[limits]\nqueue = 1\nconcurrency = 3\n[[provider]]\nname = \"openai\"\nqueue = 4\n";
    assert_eq!(
        changes(before, after),
        ["limits.concurrency", "provider.openai.queue"]
    );
}

/// Files as people write them. Comments with a number are looked for in the end.
const FILES: [&str; 5] = [
    "",
    "# c1\n[limits] # c2\nqueue = 5 # c3\n# c4\n\n# c5\n[[provider]] # c6\nname = \"openai\" # c7\n# c8\nconcurrency = 3\n# c9\n[[route]] # c10\nmodel = \"a*\" # c11\nprovider = \"ollama\" # c12\n# c13",
    "# c1\r\nlimits.queue = 5 # c2\r\nserver.port = 1 # c3\r\n\r\n[dedup] # c4\r\nretry_tools = [ # c5\r\n  \"a\", # c6\r\n  # c7\r\n  \"b\" # c8\r\n] # c9\r\n[[dedup.rule]] # c10\r\nmode = \"off\" # c11\r\n",
    "# c1\nlimits = { queue = 5, idle_secs = 3.5 } # c2\nroute = [{ model = \"a\", provider = \"demo\" }] # c3\n# c4\n",
    "[server]\nport = 7337 # c1\n#[[provider]]\n#name = \"openai\"\n\n[[provider]]\nname = \"mine\" # c2\nkind = \"openai\"\nbase_url = \"http://h\" # c3\n[provider.headers] # c4\nx-team = \"blue\" # c5\n\n[[budget]]\nper = \"day\" # c6\nusd = 5.00 # c7\n",
];

fn section() -> impl Strategy<Value = Json> {
    let number = |least: i64, most: i64| prop_oneof![1 => Just(Json::Null), 3 => (least..=most).prop_map(Json::from)];
    let texts = prop_oneof![
        Just(Json::Null),
        prop::collection::vec("[a-c]{1,2}", 0..4).prop_map(|texts| json!(texts)),
    ];
    let seconds = prop_oneof![
        Just(Json::Null),
        Just(json!(0.25)),
        (1..60_i64).prop_map(Json::from)
    ];
    prop_oneof![
        number(1, 99).prop_map(|queue| json!({"limits": {"queue": queue}})),
        (number(1, 99), seconds.clone())
            .prop_map(|(calls, idle)| json!({"limits": {"concurrency": calls, "idle_secs": idle}})),
        number(0, 65_535).prop_map(|port| json!({"server": {"port": port}})),
        texts
            .clone()
            .prop_map(|tools| json!({"dedup": {"retry_tools": tools}})),
        texts.prop_map(|keys| json!({"server": {"placeholder_keys": keys}})),
        seconds
            .clone()
            .prop_map(|open| json!({"breaker": {"open_secs": open}})),
        Just(json!({"limits": null})),
        Just(json!({"dedup": null})),
        any::<bool>().prop_map(|on| json!({"notify": {"breaker": on}, "dedup": {"enabled": on}})),
        (
            prop::sample::select(vec!["openai", "ollama", "lm-studio"]),
            number(1, 9),
            seconds
        )
            .prop_map(|(name, calls, wait)| {
                json!({"provider": {name: {"concurrency": calls, "timeout_secs": wait}}})
            }),
        prop::sample::select(vec!["openai", "ollama", "mine", "yours"])
            .prop_map(|name| json!({"provider": {name: null}})),
        (prop::sample::select(vec!["mine", "yours"]), number(1, 9)).prop_map(|(name, queue)| {
            json!({"provider": {name: {"kind": "openai", "base_url": "http://h/v1",
                "queue": queue, "headers": {"x-a": "1", "x-team": null}}}})
        }),
        prop::collection::vec(
            ("[a-c]", prop::sample::select(vec!["openai", "demo"])),
            0..4
        )
        .prop_map(|rules| {
            let rule =
                |(model, provider): &(String, &str)| json!({"model": model, "provider": provider});
            json!({"route": rules.iter().map(rule).collect::<Vec<_>>()})
        }),
        prop::collection::vec(("[a-c]", prop::sample::select(vec!["off", "full"])), 0..3).prop_map(
            |rules| {
                let rule = |(tool, mode): &(String, &str)| json!({"tool": tool, "mode": mode});
                json!({"dedup": {"rule": rules.iter().map(rule).collect::<Vec<_>>()}})
            }
        ),
        prop::collection::vec((1..5_i64, prop::bool::ANY), 0..3).prop_map(|caps| {
            let cap = |(usd, narrow): &(i64, bool)| match narrow {
                true => json!({"per": "hour", "usd": usd, "model": "x*"}),
                false => json!({"per": "day", "usd": usd}),
            };
            json!({"budget": caps.iter().map(cap).collect::<Vec<_>>()})
        }),
    ]
}

/// RFC 7396 on a plain tree, as simple as can be; providers are kept by name.
fn merged(tree: &mut Json, patch: &Json) {
    let Json::Object(patch) = patch else {
        *tree = patch.clone();
        return;
    };
    if !tree.is_object() {
        *tree = json!({});
    }
    for (key, given) in patch {
        match given {
            Json::Null => drop(tree.as_object_mut().map(|tree| tree.remove(key))),
            given => merged(&mut tree[key], given),
        }
    }
}

/// The file as a tree, and the tree as the plainest file.
fn tree_of(text: &str) -> Json {
    let mut table: toml::Table = text.parse().expect("TOML");
    let list = table.remove("provider");
    let mut tree = serde_json::to_value(table).expect("a tree");
    let mut providers = json!({});
    for entry in list
        .iter()
        .flat_map(|list| list.as_array().expect("a list"))
    {
        let mut entry = serde_json::to_value(entry).expect("a tree");
        let name = entry.as_object_mut().and_then(|entry| entry.remove("name"));
        providers[name.as_ref().and_then(Json::as_str).expect("named")] = entry;
    }
    tree["provider"] = providers;
    tree
}

fn plainest(tree: &Json) -> String {
    let mut tree = tree.clone();
    let providers = tree["provider"].take();
    let named = providers
        .as_object()
        .into_iter()
        .flatten()
        .map(|(name, entry)| {
            let mut entry = entry.clone();
            entry["name"] = name.as_str().into();
            entry
        });
    tree["provider"] = named.collect();
    toml::to_string(&tree).expect("TOML")
}

/// All there is, whatever the order in which own providers were added.
fn settings(text: &str) -> Settings {
    let mut settings = Settings::parse(text, &Overrides::default())
        .unwrap_or_else(|error| panic!("{error}\n{text}"));
    settings
        .providers
        .sort_by(|one, other| one.name.cmp(&other.name));
    settings
}

fn comments(text: &str) -> Vec<String> {
    let numbered = text.split("# c").skip(1);
    let number = |rest: &str| {
        rest.chars()
            .take_while(char::is_ascii_digit)
            .collect::<String>()
    };
    numbered
        .map(number)
        .filter(|number| !number.is_empty())
        .collect()
}

fn check(text: &str, patches: &[Json]) -> Result<(), TestCaseError> {
    let (mut edited, mut tree) = (text.to_owned(), tree_of(text));
    for patch in patches {
        // A patch of a provider that is not there and that says nothing about it adds none.
        let before = edited.clone();
        edited = lay_on(&edited, patch)
            .map_err(|unfit| TestCaseError::fail(format!("{unfit:?} {patch}\n{before}")))?;
        let nothing = |given: &Json| {
            given
                .as_object()
                .is_some_and(|given| given.values().all(Json::is_null))
        };
        let mut meant = patch.clone();
        if let Some(providers) = meant.get_mut("provider").and_then(Json::as_object_mut) {
            providers.retain(|name, given| !nothing(given) || tree["provider"].get(name).is_some());
        }
        merged(&mut tree, &meant);
        prop_assert_eq!(
            settings(&edited),
            settings(&plainest(&tree)),
            "{}\n{}",
            patch,
            edited
        );
    }
    let mut had = comments(text);
    let mut has = comments(&edited);
    had.sort();
    has.sort();
    prop_assert_eq!(had, has, "every comment once: {}", edited);
    let mut lines = edited.lines();
    for prose in text
        .lines()
        .filter(|line| line.starts_with("# ─") || line.starts_with("#   "))
    {
        prop_assert!(lines.any(|line| line == prose), "in order: {}", prose);
    }
    Ok(())
}

proptest! {
    #[test]
    fn any_patches_yield_the_meant_settings_and_keep_every_comment(
        file in 0..FILES.len(),
        patches in prop::collection::vec(section(), 1..8),
    ) {
        check(FILES[file], &patches)?;
    }
}

proptest! {
    // The default file is long, and each patch reads it some times.
    #![proptest_config(ProptestConfig::with_cases(48))]
    #[test]
    fn the_default_file_too(patches in prop::collection::vec(section(), 1..8)) {
        check(DEFAULT_FILE, &patches)?;
    }
}
