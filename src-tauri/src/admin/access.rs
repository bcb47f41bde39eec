//! Who may use the admin API over HTTP: whoever has the token of this run, from a page of its own
//! or from no page at all.
//!
//! As Jupyter does it: `traygate serve` prints a link with the token in it; following it sets a
//! cookie, and the address that stays in the browser's history has no token.

use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::header::{AUTHORIZATION, COOKIE, HOST, ORIGIN};
use axum::http::{HeaderMap, StatusCode};
use axum::middleware::Next;
use axum::response::Response;
use secrecy::{ExposeSecret as _, SecretString};
use subtle::ConstantTimeEq as _;

use super::error::ApiError;
use crate::core::Core;
use crate::store::json::hex_of;

/// Random bytes in a token: 256 bits.
const TOKEN_BYTES: usize = 32;

/// The secret that opens the admin API over HTTP. Another one with each start.
pub struct Token(SecretString);

impl Token {
    /// # Panics
    /// If the system has no randomness to give: nothing can be secret there.
    pub fn random() -> Token {
        let mut bytes = [0; TOKEN_BYTES];
        getrandom::fill(&mut bytes).expect("the system gives random bytes");
        Token(hex_of(&bytes).into())
    }

    /// The token itself: for the link, the cookie and the runtime file.
    pub fn expose(&self) -> &str {
        self.0.expose_secret()
    }

    /// Compared in constant time, so that no stopwatch finds it.
    pub fn is(&self, shown: &str) -> bool {
        self.expose().as_bytes().ct_eq(shown.as_bytes()).into()
    }
}

/// The cookie's name. Cookies of all ports of a host are one jar, so the port is in it.
pub fn cookie_name(port: u16) -> String {
    format!("traygate-{port}")
}

/// Lets a request through that shows the token and comes from nowhere else.
pub async fn require_token(
    State(core): State<Arc<Core>>,
    request: Request,
    next: Next,
) -> Result<Response, ApiError> {
    own_origin_only(request.headers())?;
    if !shows_token(&core, request.headers()) {
        return Err(ApiError::new(
            StatusCode::UNAUTHORIZED,
            "token_needed",
            "the admin API wants the token of this run: open the link that `traygate serve` printed, or send it as `Authorization: Bearer …`",
        ));
    }
    Ok(next.run(request).await)
}

/// # Errors
/// The request was made by a page that is not Traygate's own. A page on another port of this
/// machine is another's too, though browsers send it the same cookies.
pub fn own_origin_only(headers: &HeaderMap) -> Result<(), ApiError> {
    let text = |name| {
        headers
            .get(name)
            .map(|value| value.to_str().unwrap_or("\u{fffd}"))
    };
    let is_own = match (text(ORIGIN), text(HOST)) {
        (None, _) => true,
        (Some(origin), Some(host)) => origin.strip_prefix("http://") == Some(host),
        (Some(_), None) => false,
    };
    // Sent by every browser of these years, for requests without an origin too.
    let by_own_page = headers
        .get("sec-fetch-site")
        .is_none_or(|site| site == "same-origin" || site == "none");
    if is_own && by_own_page {
        Ok(())
    } else {
        Err(ApiError::new(
            StatusCode::FORBIDDEN,
            "origin_forbidden",
            "the admin API answers its own pages only, so that no other web page can steer Traygate",
        ))
    }
}

/// Whether the request shows the token of this run.
pub fn shows_token(core: &Core, headers: &HeaderMap) -> bool {
    let bearer = headers.get_all(AUTHORIZATION).iter().filter_map(|value| {
        let (scheme, token) = value.to_str().ok()?.split_once(' ')?;
        scheme.eq_ignore_ascii_case("bearer").then(|| token.trim())
    });
    let name = core
        .listener
        .address()
        .map(|address| cookie_name(address.port()));
    let cookies = headers.get_all(COOKIE).iter();
    let cookies = cookies.filter_map(|value| value.to_str().ok());
    let pairs = cookies
        .flat_map(|line| line.split(';'))
        .filter_map(|pair| pair.trim().split_once('='));
    let ours = pairs.filter(|(pair, _)| name.as_deref() == Some(*pair));
    let mut shown = bearer.chain(ours.map(|(_, token)| token));
    shown.any(|token| core.token.is(token))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_token_is_another_and_only_the_whole_one_is_it() {
        let token = Token::random();
        assert_eq!(token.expose().len(), 2 * TOKEN_BYTES);
        assert_ne!(token.expose(), Token::random().expose());
        assert!(token.is(token.expose()));
        assert!(!token.is(""));
        assert!(!token.is(&token.expose()[1..]));
        assert!(!token.is(&format!("{} ", token.expose())));
    }

    #[test]
    fn only_its_own_exact_origin_may_ask() {
        let table: [(&[(&str, &str)], bool); 10] = [
            (&[("host", "127.0.0.1:7337")], true),
            (
                &[
                    ("host", "127.0.0.1:7337"),
                    ("origin", "http://127.0.0.1:7337"),
                ],
                true,
            ),
            (
                &[
                    ("host", "localhost:7337"),
                    ("origin", "http://localhost:7337"),
                ],
                true,
            ),
            (
                &[
                    ("host", "127.0.0.1:7337"),
                    ("origin", "http://localhost:7337"),
                ],
                false,
            ),
            (
                &[
                    ("host", "127.0.0.1:7337"),
                    ("origin", "http://127.0.0.1:3000"),
                ],
                false,
            ),
            (
                &[
                    ("host", "127.0.0.1:7337"),
                    ("origin", "https://127.0.0.1:7337"),
                ],
                false,
            ),
            (&[("host", "127.0.0.1:7337"), ("origin", "null")], false),
            (
                &[("host", "127.0.0.1:7337"), ("sec-fetch-site", "same-site")],
                false,
            ),
            (
                &[("host", "127.0.0.1:7337"), ("sec-fetch-site", "none")],
                true,
            ),
            (&[("origin", "http://127.0.0.1:7337")], false),
        ];
        for (headers, may) in table {
            let map: HeaderMap = headers
                .iter()
                .map(|(name, value)| (name.parse().unwrap(), value.parse().unwrap()))
                .collect();
            let named: &HeaderMap = &map;
            assert_eq!(own_origin_only(named).is_ok(), may, "{headers:?}");
        }
    }
}
