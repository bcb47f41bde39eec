use super::*;

fn parse(text: &str) -> Settings {
    match Settings::parse(text, &Overrides::default()) {
        Ok(settings) => settings,
        Err(error) => panic!("{error}"),
    }
}

fn refusal(text: &str) -> String {
    Settings::parse(text, &Overrides::default())
        .expect_err(text)
        .to_string()
}

fn names(settings: &Settings) -> Vec<&str> {
    settings.providers.iter().map(|p| &*p.name).collect()
}

/// A commented default is `#key = value`, an example is set in by three spaces.
fn uncommented(text: &str) -> String {
    let mut live = String::new();
    for line in text.lines() {
        let setting = line
            .strip_prefix('#')
            .filter(|rest| rest.starts_with(|c: char| c == '[' || c.is_ascii_lowercase()));
        live.push_str(setting.unwrap_or(line));
        live.push('\n');
    }
    live
}

fn examples(text: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut lines = text.lines().peekable();
    while let Some(line) = lines.next() {
        if !line.starts_with("#   [[") {
            continue;
        }
        let mut example = line[4..].to_owned();
        while let Some(next) = lines.next_if(|next| next.starts_with("#   ")) {
            example.push('\n');
            example.push_str(&next[4..]);
        }
        found.push(example);
    }
    found
}

#[test]
fn the_default_file_changes_nothing() {
    assert_eq!(parse(DEFAULT_FILE), parse(""));
}

#[test]
fn the_defaults_it_shows_are_the_ones_built_in() {
    let live = uncommented(DEFAULT_FILE);
    assert_eq!(parse(&live), parse(""));
}

#[test]
fn it_shows_every_setting_there_is() {
    // A made-up key makes each section name all the keys it knows.
    for section in [
        "[server]",
        "[limits]",
        "[dedup]",
        "[breaker]",
        "[log]",
        "[spend]",
        "[notify]",
    ] {
        let message = refusal(&format!("{section}\nzzzzzzzz = 1"));
        let (_, known) = message.split_once("Known here: ").expect(&message);
        for key in known.trim_end_matches('.').split(", ") {
            assert!(
                DEFAULT_FILE.contains(&format!("\n#{key} = "))
                    || DEFAULT_FILE
                        .contains(&format!("[[{}.{key}]]", section.trim_matches(['[', ']']))),
                "{section} {key}"
            );
        }
    }
    let message = refusal("[[provider]]\nname = \"openai\"\nzzzzzzzz = 1");
    let (_, known) = message.split_once("Known here: ").expect(&message);
    for key in known.trim_end_matches('.').split(", ") {
        assert!(
            DEFAULT_FILE.contains(&format!("\n#{key} = "))
                || DEFAULT_FILE.contains(&format!("\n#   {key} ")),
            "provider {key}"
        );
    }
}

#[test]
fn its_examples_are_good_ones() {
    let found = examples(DEFAULT_FILE);
    assert_eq!(found.len(), 5, "{found:?}");
    let settings = parse(&found.join("\n"));
    assert_eq!(settings.dedup.rules.len(), 1);
    assert_eq!(settings.spend.prices.len(), 1);
    assert_eq!(settings.spend.budgets[0].cap, Nanodollars(5_000_000_000));
    assert_eq!(settings.routes.len(), 2);
    assert!(settings.provider("azure").is_some());
}

#[test]
fn out_of_the_box() {
    let settings = parse("");
    assert_eq!(
        names(&settings),
        [
            "openai",
            "anthropic",
            "chatgpt",
            "openrouter",
            "ollama",
            "llama-cpp",
            "lm-studio",
            "demo"
        ]
    );
    assert_eq!(settings.server.port, 7337);
    assert_eq!(settings.server.max_body, 64 * 1024 * 1024);
    assert_eq!(settings.dedup.window, Duration::from_secs(300));
    let default = |kind| settings.default_provider(kind).map(|p| p.name.to_string());
    assert_eq!(default(ProviderKind::OpenAi).as_deref(), Some("openai"));
    assert_eq!(
        default(ProviderKind::Anthropic).as_deref(),
        Some("anthropic")
    );
    let openai = settings.provider("openai").unwrap();
    assert_eq!(openai.limits, Limits::default());
    assert_eq!(openai.origin(), "https://api.openai.com");
    assert!(openai.ask_usage);
    let ollama = settings.provider("ollama").unwrap();
    assert_eq!(ollama.limits.concurrency, 4);
    assert_eq!(ollama.limits.queue, 1000);
    for span in [
        ollama.limits.queue_wait,
        ollama.limits.first_byte,
        ollama.limits.unstreamed,
    ] {
        assert_eq!(span, Duration::from_secs(600));
    }
    assert!(ollama.ask_usage);
    assert!(!settings.provider("anthropic").unwrap().ask_usage);
    let chatgpt = settings.provider("chatgpt").unwrap();
    assert_eq!(chatgpt.key, KeySource::Pass);
    assert!(settings.routes[0].model.matches("Demo-2"));
    assert_eq!(&*settings.routes[0].provider, "demo");
}

#[test]
fn a_provider_changes_key_by_key_and_the_others_stay() {
    let settings = parse(
        "[limits]\nconcurrency = 8\ntimeout_secs = 0.5\n[breaker]\nfailures = 2\n\
         [[provider]]\nname = \"ollama\"\ntimeout_secs = 30\n\
         [[provider]]\nname = \"openai\"\nfailure_rate = 0\nheaders = { x-team = \"blue\" }\n\
         [[provider]]\nname = \"mine\"\nkind = \"openai\"\nbase_url = \"http://10.0.0.1/v1\"\n\
         local = true\nkey = \"env:MINE\"",
    );
    let ollama = settings.provider("ollama").unwrap();
    assert_eq!(ollama.limits.first_byte, Duration::from_secs(30));
    assert_eq!(ollama.limits.unstreamed, Duration::from_secs(600));
    assert_eq!(
        ollama.limits.concurrency, 4,
        "[limits] leaves local ones alone"
    );
    assert_eq!(ollama.base_url.as_str(), "http://localhost:11434/");
    assert_eq!(ollama.breaker.failures, 2);
    let openai = settings.provider("openai").unwrap();
    assert_eq!(openai.limits.concurrency, 8);
    assert_eq!(openai.limits.first_byte, Duration::from_millis(500));
    assert_eq!(
        (openai.breaker.failures, openai.breaker.failure_rate),
        (2, 0.0)
    );
    assert_eq!(openai.headers[0].1, "blue");
    let mine = settings.provider("mine").unwrap();
    assert_eq!(mine.limits.concurrency, 4);
    assert_eq!(mine.key, KeySource::Env("MINE".to_owned()));
    assert_eq!(names(&settings).last(), Some(&"mine"));
    assert_eq!(settings.providers.len(), 9);
}

#[test]
fn local_is_a_word_and_not_an_address() {
    let settings = parse("[[provider]]\nname = \"ollama\"\nlocal = false");
    assert_eq!(
        settings.provider("ollama").unwrap().limits,
        Limits::default()
    );
}

#[test]
fn a_default_of_the_person_beats_the_shipped_one_of_its_dialect() {
    let settings = parse("[[provider]]\nname = \"openrouter\"\ndefault = true");
    let default = |kind| settings.default_provider(kind).map(|p| p.name.to_string());
    assert_eq!(default(ProviderKind::OpenAi).as_deref(), Some("openrouter"));
    assert_eq!(default(ProviderKind::Ollama).as_deref(), Some("openrouter"));
    assert_eq!(
        default(ProviderKind::Anthropic).as_deref(),
        Some("anthropic")
    );
    assert!(!settings.provider("openai").unwrap().default);

    assert_eq!(
        refusal(
            "[[provider]]\nname = \"openrouter\"\ndefault = true\n\
             [[provider]]\nname = \"ollama\"\ndefault = true"
        ),
        "config.toml, line 6, provider \"ollama\" default: is true here and for provider \
         \"openrouter\". The bare paths of a dialect lead to one provider."
    );
    let settings = parse("[[provider]]\nname = \"openai\"\ndefault = false");
    assert!(settings.default_provider(ProviderKind::OpenAi).is_none());
}

#[test]
fn every_refusal_names_line_field_and_reason() {
    for (text, message) in [
        (
            "[server]\n\nport = 70000",
            "line 3, [server] port: must be 0 to 65535, is 70000",
        ),
        (
            "[server]\nport = \"7337\"",
            "line 2, [server] port: must be a whole number, is text",
        ),
        (
            "[server]\nprot = 1",
            "line 2, [server] prot: is not a known setting. Did you mean `port`?",
        ),
        (
            "[sever]\nport = 1",
            "line 1, `sever`: is not a known setting. Did you mean `server`?",
        ),
        (
            "[[providers]]\nname = \"x\"",
            "line 1, `providers`: is not a known setting. Did you mean `provider`?",
        ),
        (
            "[provider]\nname = \"x\"",
            "line 1, `provider`: must be a list of sections, is a section. Write `[[provider]]` \
             on a line of its own before each.",
        ),
        (
            "[limits]\ntimeout = 5",
            "line 2, [limits] timeout: is not a known setting. Did you mean `timeout_secs`?",
        ),
        (
            "[limits]\ntimeout_secs = 0",
            "line 2, [limits] timeout_secs: must be 0.01 to 86400 seconds, is 0",
        ),
        (
            "[limits]\ntimeout_secs = nan",
            "line 2, [limits] timeout_secs: must be 0.01 to 86400 seconds, is nan",
        ),
        (
            "[limits]\nconcurrency = -1",
            "line 2, [limits] concurrency: must be 1 to 10000, is -1",
        ),
        (
            "[[dedup.rule]]\ntool = \"a\"\nmode = \"in-flight\"",
            "line 3, [[dedup.rule]] mode: must be one of full, retry, in_flight, off. Did you \
             mean \"in_flight\"?",
        ),
        (
            "[[dedup.rule]]\ntool = \"a\"",
            "line 1, [[dedup.rule]] mode: is missing: full, retry, in_flight or off",
        ),
        (
            "[[provider]]\nname = \"x\"\nkind = \"openai\"",
            "line 1, provider \"x\" base_url: is missing, and needed for a provider of your own",
        ),
        (
            "[[provider]]\nname = \"openai\"\ntimeout_secs = 1e9",
            "line 3, provider \"openai\" timeout_secs: must be 0.01 to 86400 seconds, is 1e9",
        ),
        (
            "[[provider]]\nname = \"demo\"\nbase_url = \"http://h\"",
            "line 3, provider \"demo\" base_url: must not be set. The demo is built in: it has \
             no address of its own.",
        ),
        (
            "[[provider]]\nname = \"openai\"\n[[provider]]\nname = \"openai\"",
            "line 4, provider \"openai\" name: stands in the file twice. Put everything about a \
             provider into one [[provider]].",
        ),
        (
            "[[route]]\nmodel = \"gpt-*\"\nprovider = \"opnai\"",
            "line 3, [[route]] provider: is no provider's name. Did you mean \"openai\"?",
        ),
        (
            "[[budget]]\nper = \"day\"\nusd = -1.0",
            "line 3, [[budget]] usd: must be dollars, 0 to 1000000 with at most nine decimals \
             and no exponent, is -1.0",
        ),
        (
            "[server]\nallowed_origins = [\"*\"]",
            "line 2, [server] allowed_origins: must be web origins, `https://app.example.com`, \
             without path; `*` and `null` are never allowed",
        ),
        (
            "[[provider]]\nname = \"openai\"\nca_file = \"ca.pem\"",
            "line 3, provider \"openai\" ca_file: must be a whole path, beginning with / or ~/",
        ),
        (
            "[[provider]]\nname = \"openai\"\nheaders = { Host = \"x\" }",
            "line 3, provider \"openai\" headers: must not be host, which Traygate sets itself",
        ),
        (
            "[[provider]]\nname = \"openai\"\nbase_url = \"http://h/v1\\n/x\"",
            "line 3, provider \"openai\" base_url: must be one address, without spaces or line ends in it",
        ),
        (
            "[server]\nport = 1\nport = 2",
            "line 3: this is not TOML: duplicate key",
        ),
    ] {
        assert_eq!(refusal(text), format!("config.toml, {message}"), "{text}");
    }
}

#[test]
fn names_that_an_address_uses_otherwise_are_refused() {
    for name in [
        "", "t", "traygate", "api", "v1", "v1beta", "@me", "Open", "a/b", "chat", "-a",
    ] {
        let message = refusal(&format!("[[provider]]\nname = \"{name}\""));
        assert!(
            message.contains("line 2, [[provider]] name: must be"),
            "{message}"
        );
    }
    for name in ["vllm", "v", "1x", "my.box_2-b"] {
        parse(&format!(
            "[[provider]]\nname = \"{name}\"\nkind = \"openai\"\nbase_url = \"http://h\""
        ));
    }
}

#[test]
fn a_key_in_the_file_is_refused_and_never_repeated() {
    let key = "sk-proj-4fE9aXq2LmN8";
    let lines = [
        format!("key = \"{key}\""),
        format!("key = \"env:{key}\""),
        format!("key = [\"{key}\"]"),
        format!("key = {key}"),
        key.to_owned(),
        format!("{key} = 1"),
        format!("api_key = \"{key}\""),
        format!("kind = \"{key}\""),
        format!("local = \"{key}\""),
        format!("timeout_secs = \"{key}\""),
        format!("base_url = \"{key}\""),
        format!("base_url = \"https://user:{key}@host/v1\""),
        format!("base_url = \"https://{key}@host/v1\""),
        format!("base_url = \"https://host/v1?key={key}\""),
        format!("base_url = \"https://host/v1?api-key={key}\""),
        format!("base_url = \"https://host/v1#{key}\""),
        format!("base_url = \"ftp://host/{key}\""),
        format!("auth_header = \"bearer {key}\""),
        format!("headers = {{ a = \"{key}\\n\" , \"b b\" = \"{key}\" }}"),
        format!("ca_file = \"{key}\""),
        format!("key = \"{key}"),
    ];
    for line in lines {
        let text = format!("[[provider]]\nname = \"openai\"\n{line}\n");
        let error = Settings::parse(&text, &Overrides::default()).expect_err(&line);
        assert_eq!(error.line, Some(3), "{line}: {error}");
        for shown in [error.to_string(), format!("{error:?}")] {
            assert!(!shown.contains("4fE9aXq2LmN8"), "{line}: {shown}");
        }
    }
    assert_eq!(
        refusal(&format!("[[provider]]\nname = \"openai\"\nkey = \"{key}\"")),
        "config.toml, line 3, provider \"openai\" key: must be auto, keyring, pass, none or \
         env:NAME. A key itself does not belong in this file: take it out and run \
         `traygate key set`; if anyone else could read the file, replace the key."
    );
}

#[test]
fn header_values_are_not_shown_with_the_settings() {
    let settings =
        parse("[[provider]]\nname = \"openai\"\nheaders = { authorization = \"Basic c2VjcmV0\" }");
    let openai = settings.provider("openai").unwrap();
    assert_eq!(openai.headers[0].1, "Basic c2VjcmV0");
    assert!(!format!("{settings:?}").contains("c2VjcmV0"));
}

#[test]
fn hosts_and_origins_become_what_requests_say() {
    let settings = parse(
        "[server]\nhost = [\"127.0.0.1\", \"172.17.0.1\", \"::1\", \"172.17.0.1\"]\n\
         allowed_hosts = [\"MyBox.Lan\", \"::1\", \"192.168.0.7\"]\n\
         allowed_origins = [\"https://App.Example.com/\", \"vscode-webview://abc\"]",
    );
    assert_eq!(settings.server.host, [IpAddr::from([172, 17, 0, 1])]);
    assert_eq!(
        settings.server.allowed_hosts,
        ["mybox.lan", "[::1]", "192.168.0.7"]
    );
    assert_eq!(
        settings.server.allowed_origins,
        ["https://app.example.com", "vscode-webview://abc"]
    );
    for host in ["http://x", "x:80", "*", "a/b", ""] {
        refusal(&format!("[server]\nallowed_hosts = [\"{host}\"]"));
    }
    for origin in [
        "app.example.com",
        "https://x/path",
        "null",
        "https://*",
        "https://",
        "://x",
    ] {
        refusal(&format!("[server]\nallowed_origins = [\"{origin}\"]"));
    }
}

#[test]
fn patterns_do_not_look_at_case() {
    let pattern = Pattern::new("codex*");
    assert!(pattern.matches("Codex_CLI") && pattern.matches("codex"));
    assert!(!pattern.matches("my-codex"));
    assert!(Pattern::new("gpt-?").matches("GPT-5"));
}

#[test]
fn money_is_read_digit_by_digit() {
    assert_eq!(
        Nanodollars::from_decimal("0.1"),
        Some(Nanodollars(100_000_000))
    );
    assert_eq!(
        Nanodollars::from_decimal("5"),
        Some(Nanodollars(5_000_000_000))
    );
    assert_eq!(
        Nanodollars::from_decimal("0.000000001"),
        Some(Nanodollars(1))
    );
    assert_eq!(
        Nanodollars::from_decimal("1000000"),
        Some(Nanodollars(1_000_000_000_000_000))
    );
    for text in [
        "",
        ".5",
        "-1",
        "1e3",
        "1000000.1",
        "0.0000000001",
        "1.2.3",
        "nan",
        "١",
    ] {
        assert_eq!(Nanodollars::from_decimal(text), None, "{text}");
    }
}

#[test]
fn flags_win_over_the_file_for_every_provider() {
    let overrides = Overrides {
        host: Some(vec![
            IpAddr::from([0, 0, 0, 0]),
            IpAddr::from([127, 0, 0, 1]),
        ]),
        port: Some(0),
        timeout: Some(Duration::from_secs_f64(1.5)),
        concurrency: Some(2),
        dedup_window: Some(Duration::ZERO),
        from_variables: Vec::new(),
    };
    let text = "[server]\nport = 1\n[[provider]]\nname = \"ollama\"\ntimeout_secs = 9";
    let settings = Settings::parse(text, &overrides).unwrap();
    assert_eq!(settings.server.host, [IpAddr::from([0, 0, 0, 0])]);
    assert_eq!(settings.server.port, 0);
    assert_eq!(settings.dedup.window, Duration::ZERO);
    for provider in &settings.providers {
        assert_eq!(provider.limits.first_byte, Duration::from_millis(1500));
        assert_eq!(provider.limits.unstreamed, Duration::from_millis(1500));
        assert_eq!(provider.limits.concurrency, 2);
        assert_eq!(provider.limits.idle, Duration::from_secs(600));
    }
    let overrides = Overrides {
        concurrency: Some(0),
        ..Overrides::default()
    };
    assert_eq!(
        Settings::parse("", &overrides).unwrap_err().to_string(),
        "--concurrency: must be 1 to 10000, is 0"
    );
}

#[test]
fn a_changed_field_that_something_wins_over_is_not_in_force() {
    let overrides = Overrides {
        port: Some(1),
        concurrency: Some(2),
        from_variables: vec![Flag::Concurrency],
        ..Overrides::default()
    };
    let fields = ["limits.queue", "provider.b.concurrency", "server.port"];
    let (in_force, overridden) = overrides.part(fields.map(str::to_owned).to_vec());
    assert_eq!(in_force, ["limits.queue"]);
    assert_eq!(
        overridden,
        [
            "provider.b.concurrency (TRAYGATE_CONCURRENCY)",
            "server.port (--port)"
        ]
    );
}

#[test]
fn a_file_is_written_once_for_its_owner_and_read_back() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("new/folder/config.toml");
    let defaults = Settings::load(&path, &Overrides::default()).unwrap();
    assert!(write_default(&path).unwrap());
    assert_eq!(std::fs::read_to_string(&path).unwrap(), DEFAULT_FILE);
    assert_eq!(
        Settings::load(&path, &Overrides::default()).unwrap(),
        defaults
    );
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        let mode = path.metadata().unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
    }
    std::fs::write(&path, "[server]\nport = 1").unwrap();
    assert!(!write_default(&path).unwrap());
    assert_eq!(
        Settings::load(&path, &Overrides::default())
            .unwrap()
            .server
            .port,
        1
    );
    let left: Vec<_> = std::fs::read_dir(path.parent().unwrap()).unwrap().collect();
    assert_eq!(left.len(), 1, "no draft stays behind");
}

#[test]
fn a_file_that_cannot_be_read_says_why() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("config.toml");
    std::fs::write(&path, b"[server]\n# \xff\n").unwrap();
    let error = Settings::load(&path, &Overrides::default()).unwrap_err();
    assert_eq!(error.to_string(), "config.toml, line 2: is not UTF-8 text");
    let error = Settings::load(folder.path(), &Overrides::default()).unwrap_err();
    assert!(error.reason.starts_with("cannot be read: "), "{error}");
    std::fs::write(&path, "\u{feff}[server]\r\nport = 2\r\n").unwrap();
    let settings = Settings::load(&path, &Overrides::default()).unwrap();
    assert_eq!(
        settings.server.port, 2,
        "an editor's byte order mark is nothing"
    );
}
