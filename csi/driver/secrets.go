package driver

import (
	"fmt"
	"strings"

	csispec "github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	"github.com/gabion-storage/gabion/server/block"
)

// withoutSecrets is a request without the fields that the specification marks
// as secret; itself if they are empty.
func withoutSecrets(req any) any {
	m, ok := req.(proto.Message)
	if !ok {
		return req
	}
	var secret []protoreflect.FieldDescriptor
	m.ProtoReflect().Range(func(f protoreflect.FieldDescriptor, _ protoreflect.Value) bool {
		if isSecret(f) {
			secret = append(secret, f)
		}
		return true
	})
	if len(secret) == 0 {
		return req
	}
	m = proto.Clone(m)
	for _, f := range secret {
		m.ProtoReflect().Clear(f)
	}
	return m
}

func isSecret(f protoreflect.FieldDescriptor) bool {
	return proto.HasExtension(f.Options(), csispec.E_CsiSecret) && proto.GetExtension(f.Options(), csispec.E_CsiSecret).(bool)
}

// minHidden keeps words of everyday length in sentences: what is shorter is no secret worth the name.
const minHidden = 8

// redact replaces in text whatever of the request may hold a secret: secrets,
// mount options, and the two contexts, less the ids that this driver put there.
// An error may have quoted only the beginning of it.
func redact(req any, text string) string {
	m, ok := req.(proto.Message)
	if !ok {
		return text
	}
	hide(m.ProtoReflect(), func(value, instead string) {
		text = replace(text, value, instead)
		if _, v, isPair := strings.Cut(value, "="); isPair {
			text = replace(text, v, instead)
		}
	})
	return text
}

// replace puts instead in place of every beginning of value that text has, if it is long enough to tell something.
func replace(text, value, instead string) string {
	if len(value) < minHidden {
		return text
	}
	var b strings.Builder
	for {
		at := strings.Index(text, value[:minHidden])
		if at < 0 {
			break
		}
		end := minHidden
		for end < len(value) && at+end < len(text) && value[end] == text[at+end] {
			end++
		}
		b.WriteString(text[:at])
		b.WriteString(instead)
		text = text[at+end:]
	}
	b.WriteString(text)
	return strings.ToValidUTF8(b.String(), "")
}

// hide calls found for each string of a message that may be a secret, with a word for it.
func hide(m protoreflect.Message, found func(value, instead string)) {
	m.Range(func(f protoreflect.FieldDescriptor, v protoreflect.Value) bool {
		switch name := string(f.Name()); {
		case f.IsMap() && isSecret(f):
			eachValue(v.Map(), func(s string) { found(s, "(secret)") })
		case f.IsMap() && (name == "publish_context" || name == "volume_context"):
			eachValue(v.Map(), func(s string) {
				if _, err := block.ParseUUID(s); err != nil {
					found(s, "("+strings.ReplaceAll(name, "_", " ")+")")
				}
			})
		case f.IsList() && name == "mount_flags":
			for i := range v.List().Len() {
				found(v.List().Get(i).String(), fmt.Sprintf("(mount flag %d)", i+1))
			}
		case f.IsList() && f.Message() != nil:
			for i := range v.List().Len() {
				hide(v.List().Get(i).Message(), found)
			}
		case !f.IsMap() && f.Message() != nil:
			hide(v.Message(), found)
		}
		return true
	})
}

func eachValue(m protoreflect.Map, f func(string)) {
	m.Range(func(_ protoreflect.MapKey, v protoreflect.Value) bool {
		if s, ok := v.Interface().(string); ok {
			f(s)
		}
		return true
	})
}
