//! `traygate key`: puts provider keys into the system's keyring and takes them out again.

use std::io::{IsTerminal, Read, Write};
use std::path::Path;
use std::process::ExitCode;
use std::sync::{Arc, mpsc};
use std::time::Duration;

use anyhow::{Context, bail};
use clap::{Args, Subcommand};
use secrecy::SecretString;
use secrecy::zeroize::Zeroizing;

use crate::keys::{self, ACCESS_TOKEN, KeyError, KeyState};
use crate::runtime;
use crate::settings::{KeySource, ProviderSettings, Settings};

/// After which a silent keyring is explained.
const PATIENCE: Duration = Duration::from_secs(2);

/// `traygate key …`.
#[derive(Subcommand, Debug)]
pub enum KeyCommand {
    /// Store a provider's key, in place of an older one
    ///
    /// The key is read from a hidden prompt or from standard input, never from the command
    /// line, where other programs and the shell's history would see it:
    ///
    ///   traygate key set openai
    ///   pass show openai | traygate key set openai
    ///
    /// It is bound to the provider's present address. `access-token` in place of a provider is
    /// the token that callers from other machines must show.
    #[command(verbatim_doc_comment)]
    Set(Named),
    /// Delete a provider's key
    Delete(Named),
    /// Say for each provider where its key comes from
    List {
        /// Only this one
        #[arg(value_name = "PROVIDER")]
        provider: Option<String>,
    },
}

/// The provider whose key it is.
#[derive(Args, Debug)]
pub struct Named {
    /// A provider's name, or access-token
    #[arg(value_name = "PROVIDER")]
    provider: String,
    // Caught here, since clap's own refusal would repeat what may be a key.
    #[arg(hide = true, num_args = 0.., allow_hyphen_values = true, trailing_var_arg = true)]
    surplus: Vec<String>,
}

/// Does what `command` asks, and says so on `out`.
///
/// # Errors
/// An unknown provider, a key that cannot be one, a keyring that cannot be used.
pub fn run(
    command: &KeyCommand,
    settings: &Settings,
    data_dir: &Path,
    out: &mut impl Write,
) -> anyhow::Result<ExitCode> {
    match command {
        KeyCommand::Set(named) => {
            let target = named.target(settings)?;
            let key = read_key(&target)?;
            patiently(|| keys::set(&target.name, &target.origin, &key))
                .with_context(|| format!("the key of {} was not stored", target.name))?;
            writeln!(out, "{}", target.stored())?;
            tell_running(data_dir, out)?;
        }
        KeyCommand::Delete(named) => {
            let target = named.target(settings)?;
            let deleted = patiently(|| keys::delete(&target.name))
                .with_context(|| format!("the key of {} was not deleted", target.name))?;
            let what = if deleted {
                "Deleted"
            } else {
                "There was no stored"
            };
            writeln!(out, "{what} key of {}.", target.name)?;
            if deleted {
                tell_running(data_dir, out)?;
            }
        }
        KeyCommand::List { provider } => {
            let targets = match provider {
                Some(name) => vec![Target::find(name, settings)?],
                None => Target::all(settings),
            };
            let wanted = targets
                .iter()
                .filter(|target| target.uses_keyring())
                .map(|target| (Arc::clone(&target.name), target.origin.clone()))
                .collect();
            let (table, problem) = listing(&targets, keys::states(wanted), |name| {
                std::env::var_os(name).is_some_and(|value| !value.is_empty())
            });
            write!(out, "{table}")?;
            if let Some(problem) = problem {
                return Err(problem.into());
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// A Traygate that runs on this folder reads the keyring again.
fn tell_running(data_dir: &Path, out: &mut impl Write) -> anyhow::Result<()> {
    let Some(running) = runtime::find(data_dir) else {
        return Ok(());
    };
    let tokio = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("the runtime cannot start")?;
    if tokio.block_on(running.reload_keys()) {
        writeln!(out, "The running Traygate goes by it from now on.")?;
    }
    Ok(())
}

/// Does `work`, and says what it may be waiting for if that takes long.
fn patiently<T: Send>(work: impl FnOnce() -> Result<T, KeyError> + Send) -> Result<T, KeyError> {
    let (done, ended) = mpsc::channel::<()>();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            if let Err(mpsc::RecvTimeoutError::Timeout) = ended.recv_timeout(PATIENCE) {
                eprintln!("The keyring has not answered yet: it may be asking to be unlocked.");
            }
        });
        let result = work();
        drop(done);
        result
    })
}

impl Named {
    fn target(&self, settings: &Settings) -> anyhow::Result<Target> {
        if !self.surplus.is_empty() {
            bail!(
                "a key is never given on the command line, where other programs and the shell's \
                 history see it. Leave it out: it is asked for, or read from standard input. If \
                 that was a real key, replace it"
            );
        }
        Target::find(&self.provider, settings)
    }
}

/// What a key is for.
struct Target {
    name: Arc<str>,
    origin: String,
    /// `None` for the access token.
    source: Option<KeySource>,
}

impl Target {
    /// The name is not repeated if it is unknown: it may be a key in the wrong place.
    fn find(name: &str, settings: &Settings) -> anyhow::Result<Self> {
        let all = Self::all(settings);
        let names: Vec<&str> = all.iter().map(|target| &*target.name).collect();
        let Some(at) = names.iter().position(|known| *known == name) else {
            bail!(
                "there is no provider of that name; there are {}",
                names.join(", ")
            );
        };
        all.into_iter()
            .nth(at)
            .context("the provider found is one of them")
    }

    /// Every provider, and the access token last.
    fn all(settings: &Settings) -> Vec<Self> {
        let of_provider = |provider: &ProviderSettings| Self {
            name: Arc::clone(&provider.name),
            origin: provider.origin(),
            source: Some(provider.key.clone()),
        };
        let access_token = Self {
            name: Arc::from(ACCESS_TOKEN),
            origin: String::new(),
            source: None,
        };
        let providers = settings.providers.iter().map(of_provider);
        providers.chain([access_token]).collect()
    }

    fn uses_keyring(&self) -> bool {
        matches!(
            self.source,
            None | Some(KeySource::Auto | KeySource::Keyring)
        )
    }

    fn stored(&self) -> String {
        let name = &self.name;
        let unused = |setting: &str| {
            format!(
                "Stored the key of {name}. It is not used while config.toml has key = \"{setting}\" \
                 there."
            )
        };
        match &self.source {
            None => "Stored the access token.".to_owned(),
            Some(KeySource::Auto | KeySource::Keyring) => {
                format!("Stored the key of {name}, for {} only.", self.origin)
            }
            Some(KeySource::Env(variable)) => unused(&format!("env:{variable}")),
            Some(KeySource::Pass) => unused("pass"),
            Some(KeySource::None) => unused("none"),
        }
    }
}

/// From a hidden prompt where a person sits, else everything on standard input.
fn read_key(target: &Target) -> anyhow::Result<SecretString> {
    // More than any key: a file sent in by mistake is refused, not swallowed.
    const LIMIT: u64 = 64 * 1024;
    let stdin = std::io::stdin();
    let raw = if stdin.is_terminal() {
        let prompt = match target.source {
            None => "Access token (not shown): ".to_owned(),
            Some(_) => format!("Key for {} at {} (not shown): ", target.name, target.origin),
        };
        Zeroizing::new(rpassword::prompt_password(prompt).context("no key was read")?)
    } else {
        let mut raw = Zeroizing::new(String::with_capacity(LIMIT as usize));
        stdin
            .lock()
            .take(LIMIT)
            .read_to_string(&mut raw)
            .context("no key was read from standard input")?;
        raw
    };
    Ok(keys::validate(&raw)?)
}

/// A line for each of `targets`. `states` are those of the ones that use the keyring, in
/// order; where it gave none, its reason is returned too.
fn listing(
    targets: &[Target],
    states: Result<Vec<KeyState>, KeyError>,
    is_set: impl Fn(&str) -> bool,
) -> (String, Option<KeyError>) {
    let (mut states, problem) = match states {
        Ok(states) => (states.into_iter(), None),
        Err(error) => (Vec::new().into_iter(), Some(error)),
    };
    let width = targets.iter().map(|target| target.name.len()).max();
    let mut table = String::new();
    for target in targets {
        let says = match &target.source {
            Some(KeySource::Env(name)) if is_set(name) => format!("from ${name}"),
            Some(KeySource::Env(name)) => format!("from ${name}, which is not set"),
            Some(KeySource::Pass) => "the client's own".to_owned(),
            Some(KeySource::None) => "none".to_owned(),
            None | Some(KeySource::Auto | KeySource::Keyring) => match states.next() {
                Some(KeyState::Stored) => "stored".to_owned(),
                Some(KeyState::NotStored) => "not stored".to_owned(),
                Some(KeyState::OtherOrigin) => format!(
                    "stored for another address: set it anew to use it for {}",
                    target.origin
                ),
                None => "unknown".to_owned(),
            },
        };
        let name = &target.name;
        let width = width.unwrap_or(0);
        table.push_str(&format!("{name:width$}  {says}\n"));
    }
    (table, problem)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::Overrides;
    use clap::Parser;

    #[derive(Parser, Debug)]
    struct Cli {
        #[command(subcommand)]
        key: KeyCommand,
    }

    fn refusal(line: &[&str]) -> anyhow::Error {
        let args = Cli::try_parse_from(line).unwrap_or_else(|error| panic!("{error}"));
        let mut out = Vec::new();
        let error = run(&args.key, &settings(), Path::new("nowhere"), &mut out).unwrap_err();
        assert!(out.is_empty());
        error
    }

    fn settings() -> Settings {
        let text = "[[provider]]\nname = \"openrouter\"\nkey = \"env:ROUTER\"\n\
                    [[provider]]\nname = \"ollama\"\nkey = \"env:UNSET\"";
        Settings::parse(text, &Overrides::default()).unwrap()
    }

    #[test]
    fn a_key_on_the_command_line_is_refused_and_not_repeated() {
        for line in [
            &["key", "set", "openai", "sk-abc"][..],
            &["key", "set", "openai", "--", "sk-abc"],
            &["key", "set", "openai", "-sk-abc"],
            &["key", "set", "sk-abc"],
            &["key", "delete", "sk-abc"],
            &["key", "list", "sk-abc"],
        ] {
            let error = refusal(line);
            assert!(!format!("{error:?}").contains("sk-abc"), "{error:?}");
        }
    }

    #[test]
    fn an_unknown_provider_is_told_which_there_are() {
        assert_eq!(
            refusal(&["key", "set", "opnai"]).to_string(),
            "there is no provider of that name; there are openai, anthropic, chatgpt, \
             openrouter, ollama, llama-cpp, lm-studio, demo, access-token"
        );
    }

    #[test]
    fn the_list_says_where_each_key_comes_from() {
        use KeyState::{NotStored, OtherOrigin, Stored};
        let targets = Target::all(&settings());
        let states = vec![Stored, OtherOrigin, NotStored, NotStored, Stored];
        let (table, problem) = listing(&targets, Ok(states), |name| name == "ROUTER");
        assert_eq!(problem, None);
        assert_eq!(
            table,
            "openai        stored\n\
             anthropic     stored for another address: set it anew to use it for \
             https://api.anthropic.com\n\
             chatgpt       the client's own\n\
             openrouter    from $ROUTER\n\
             ollama        from $UNSET, which is not set\n\
             llama-cpp     not stored\n\
             lm-studio     not stored\n\
             demo          none\n\
             access-token  stored\n"
        );
        let (table, problem) = listing(&targets, Err(KeyError::Locked), |_| true);
        assert!(table.contains("openai        unknown\n"), "{table}");
        assert!(table.contains("openrouter    from $ROUTER\n"), "{table}");
        assert_eq!(problem, Some(KeyError::Locked));
    }
}
