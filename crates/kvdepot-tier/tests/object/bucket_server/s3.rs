//! Requests of S3 and, with other names for the conditions, of Google Cloud Storage.

use std::collections::BTreeMap;

use super::{Bucket, Dialect, Object, Request, Response};

/// Adds what tells an object's version.
fn versioned(response: Response, version: u64) -> Response {
    response.with("ETag", format!("\"{version}\"")).with("x-goog-generation", version)
}

fn stored(bucket: &mut Bucket, name: &str, bytes: Vec<u8>) -> Response {
    versioned(Response::new(200, String::new()), bucket.store(name, bytes))
}

pub(super) fn serve(bucket: &mut Bucket, request: &Request, name: &str, is_blind: bool) -> Response {
    let upload = request.query.get("uploadId").cloned();
    match (request.method.as_str(), upload) {
        ("PUT", Some(id)) => {
            let part = request.query["partNumber"].clone();
            let tag = format!("\"part{part}\"");
            let Some(parts) = bucket.uploads.get_mut(&id) else { return Response::new(404, String::new()) };
            parts.insert(part, request.body.clone());
            Response::new(200, String::new()).with("ETag", tag)
        }
        ("POST", Some(id)) => match bucket.uploads.remove(&id) {
            Some(parts) => {
                let mut parts: Vec<(u32, Vec<u8>)> =
                    parts.into_iter().map(|(part, bytes)| (part.parse().unwrap(), bytes)).collect();
                parts.sort();
                let mut done = stored(bucket, name, parts.into_iter().flat_map(|(_, bytes)| bytes).collect());
                done.body =
                    b"<CompleteMultipartUploadResult><ETag>x</ETag></CompleteMultipartUploadResult>".into();
                done
            }
            None => Response::new(404, String::new()),
        },
        ("DELETE", Some(id)) => {
            bucket.uploads.remove(&id);
            Response::new(204, String::new())
        }
        ("POST", None) if request.query.contains_key("uploads") => {
            let id = format!("upload{}", bucket.next());
            bucket.uploads.insert(id.clone(), BTreeMap::new());
            Response::new(
                200,
                format!(
                    "<InitiateMultipartUploadResult><UploadId>{id}</UploadId></InitiateMultipartUploadResult>"
                ),
            )
        }
        ("POST", None) if bucket.dialect == Dialect::S3 => delete_many(bucket, request),
        ("DELETE", None) if bucket.dialect == Dialect::Google => match bucket.objects.remove(name) {
            Some(_) => Response::new(204, String::new()),
            None => Response::error(404, "NoSuchKey"),
        },
        ("PUT", None) => put(bucket, request, name, is_blind),
        ("GET", None) if request.is_list() => list(bucket, request),
        ("GET" | "HEAD", None) => match bucket.objects.get(name) {
            Some(object) => {
                let found = Response { body: object.bytes.clone(), ..Response::new(200, String::new()) };
                versioned(found, object.version)
            }
            None => Response::error(404, "NoSuchKey"),
        },
        _ => Response::new(405, String::new()),
    }
}

fn put(bucket: &mut Bucket, request: &Request, name: &str, is_blind: bool) -> Response {
    let there = bucket.objects.get(name).map(|object| object.version);
    let said = |name: &str| request.headers.get(name).map(String::as_str);
    let is_refused = match bucket.dialect {
        Dialect::Google => match said("x-goog-if-generation-match") {
            Some(generation) => generation != there.unwrap_or(0).to_string(),
            None => false,
        },
        _ => match (said("if-none-match"), said("if-match")) {
            (Some(_), _) => there.is_some(),
            (_, Some(tag)) => there.map(|version| format!("\"{version}\"")).as_deref() != Some(tag),
            _ => false,
        },
    };
    if is_refused && !is_blind {
        return Response::error(412, "PreconditionFailed");
    }
    stored(bucket, name, request.body.clone())
}

fn delete_many(bucket: &mut Bucket, request: &Request) -> Response {
    let text = String::from_utf8_lossy(&request.body).into_owned();
    let names = text.split("<Key>").skip(1).filter_map(|part| part.split("</Key>").next());
    let mut out = String::from("<DeleteResult>");
    for name in names {
        bucket.objects.remove(name);
        out += &format!("<Deleted><Key>{name}</Key></Deleted>");
    }
    Response::new(200, out + "</DeleteResult>")
}

fn list(bucket: &Bucket, request: &Request) -> Response {
    let mut out = String::from("<ListBucketResult>");
    let (directories, found) = bucket.below(request);
    for directory in directories {
        out += &format!("<CommonPrefixes><Prefix>{directory}</Prefix></CommonPrefixes>");
    }
    for (name, Object { bytes, version }) in found {
        out += &format!(
            "<Contents><Key>{name}</Key><LastModified>2024-01-01T00:00:00.000Z</LastModified><Size>{}</Size>\
             <ETag>&quot;{version}&quot;</ETag></Contents>",
            bytes.len()
        );
    }
    Response::new(200, out + "</ListBucketResult>")
}
