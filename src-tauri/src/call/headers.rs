//! Which headers concern one hop, one side or one exchange only, and so are not passed on or not
//! shared.

use http::header::{CONNECTION, CONTENT_LENGTH, HeaderMap, HeaderName, TRANSFER_ENCODING};

/// Takes off what RFC 9110 (7.6.1) makes a matter of one connection, in either direction.
pub fn remove_hop_by_hop(headers: &mut HeaderMap) {
    // Most messages name nothing in `connection` but `keep-alive` or `close`.
    let named: Vec<HeaderName> = headers
        .get_all(CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','))
        .filter_map(|name| HeaderName::from_bytes(name.trim().as_bytes()).ok())
        .collect();
    for name in named {
        headers.remove(name);
    }
    if headers.contains_key(TRANSFER_ENCODING) {
        // A length beside it is not the body's (RFC 9112, 6.3).
        headers.remove(CONTENT_LENGTH);
    }
    let fixed: Vec<HeaderName> = headers
        .keys()
        .filter(|name| is_hop_by_hop(name.as_str()))
        .cloned()
        .collect();
    for name in fixed {
        headers.remove(name);
    }
}

fn is_hop_by_hop(name: &str) -> bool {
    matches!(
        name,
        "connection"
            | "keep-alive"
            | "te"
            | "trailer"
            | "transfer-encoding"
            | "upgrade"
            | "proxy-connection"
            | "proxy-authenticate"
            | "proxy-authorization"
            | "proxy-authentication-info"
    )
}

/// Headers that tell of one exchange: whoever gets a shared or kept answer does not get them.
pub fn remove_exchange(headers: &mut HeaderMap) {
    let own: Vec<HeaderName> = headers
        .keys()
        .filter(|name| is_of_one_exchange(name.as_str()))
        .cloned()
        .collect();
    for name in own {
        headers.remove(name);
    }
}

pub fn is_of_one_exchange(name: &str) -> bool {
    matches!(name, "date" | "set-cookie" | "age")
        || name.starts_with("x-ratelimit-")
        || name.starts_with("ratelimit")
        || name.starts_with("anthropic-ratelimit-")
}

/// Takes the provider's words on which web pages may read the answer off: those are about its own
/// site, and ours are set in their place.
pub fn remove_cors(headers: &mut HeaderMap) {
    let cors: Vec<HeaderName> = headers
        .keys()
        .filter(|name| name.as_str().starts_with("access-control-"))
        .cloned()
        .collect();
    for name in cors {
        headers.remove(name);
    }
}

/// Takes off what concerns only this hop or only the local side.
pub fn keep_end_to_end(headers: &mut HeaderMap) {
    remove_hop_by_hop(headers);
    let local: Vec<HeaderName> = headers
        .keys()
        .filter(|name| is_local(name.as_str()))
        .cloned()
        .collect();
    for name in local {
        headers.remove(name);
    }
}

/// Headers of the local side that no provider is to see. `content-length` is set anew from the
/// body.
fn is_local(name: &str) -> bool {
    matches!(
        name,
        "host"
            | "origin"
            | "cookie"
            | "referer"
            | "expect"
            | "content-length"
            | "forwarded"
            | "via"
            | "x-real-ip"
            | "http2-settings"
    ) || [
        "x-traygate-",
        "x-forwarded-",
        "sec-fetch-",
        "sec-ch-",
        "access-control-request-",
    ]
    .iter()
    .any(|prefix| name.starts_with(prefix))
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::HeaderValue;

    #[test]
    fn local_headers_stay_here() {
        let mut headers = HeaderMap::new();
        for name in [
            "host",
            "origin",
            "cookie",
            "referer",
            "x-forwarded-for",
            "x-traygate-tag",
            "sec-fetch-mode",
            "connection",
            "x-hop",
            "te",
            "proxy-authorization",
            "keep-alive",
            "x-app",
            "anthropic-beta",
            "anthropic-dangerous-direct-browser-access",
        ] {
            headers.insert(HeaderName::from_static(name), HeaderValue::from_static("x"));
        }
        headers.insert("connection", HeaderValue::from_static("keep-alive, X-Hop"));
        keep_end_to_end(&mut headers);
        let mut left: Vec<&str> = headers.keys().map(HeaderName::as_str).collect();
        left.sort_unstable();
        assert_eq!(
            left,
            [
                "anthropic-beta",
                "anthropic-dangerous-direct-browser-access",
                "x-app"
            ]
        );
    }
}
