// SPDX-License-Identifier: Apache-2.0

package localv1_test

import (
	"flag"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/kpng-project/kpng/internal/wire/clusterv1"
	"github.com/kpng-project/kpng/internal/wire/localv1"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/dynamicpb"
)

var files = []protoreflect.FileDescriptor{localv1.File_api_localv1_localv1_proto, clusterv1.File_api_clusterv1_clusterv1_proto}

// allMessages returns the descriptors of all message types except map entries.
func allMessages() []protoreflect.MessageDescriptor {
	var list []protoreflect.MessageDescriptor
	for _, file := range files {
		for i := range file.Messages().Len() {
			list = append(list, file.Messages().Get(i))
		}
	}
	return list
}

// TestFieldNumbersOfOriginalKpng compares the messages with a list of the original kpng's
// field numbers. It finds a wrong number even if the recorded bytes contain the same
// wrong number.
func TestFieldNumbersOfOriginalKpng(t *testing.T) {
	for message, fields := range map[protoreflect.Name]string{
		"WatchReq":         "NodeName 1",
		"OpItem":           "Sync 1 Set 2 Delete 3 Reset 4",
		"Ref":              "Set 1 Path 2",
		"Value":            "Ref 1 Bytes 2",
		"Service":          "Namespace 1 Name 2 Type 3 IPs 4 MapIP 5 Ports 6 ExternalTrafficToLocal 7 Labels 8 Annotations 9 IPFilters 10 ClientIP 11 InternalTrafficToLocal 12 HealthCheckNodePort 13",
		"IPFilter":         "TargetIPs 1 SourceRanges 2",
		"ServiceIPs":       "ClusterIPs 1 ExternalIPs 2 Headless 3 LoadBalancerIPs 4",
		"IPSet":            "V4 1 V6 2",
		"Endpoint":         "Hostname 1 IPs 2 Local 3 PortOverrides 4 Scopes 5",
		"EndpointScopes":   "Internal 1 External 2",
		"PortName":         "Name 1 Port 2",
		"PortMapping":      "Name 1 Protocol 2 Port 3 NodePort 4 TargetPort 5 TargetPortName 6",
		"ClientIPAffinity": "TimeoutSeconds 1",
	} {
		all := files[0].Messages().ByName(message).Fields()
		var old []string
		for i := range all.Len() {
			if f := all.Get(i); f.Number() < 100 {
				old = append(old, fmt.Sprintf("%s %d", f.Name(), f.Number()))
			}
		}
		if got := strings.Join(old, " "); got != fields {
			t.Errorf("%s has %s, want %s", message, got, fields)
		}
	}
}

var update = flag.Bool("update", false, "rewrite testdata/golden.txt")

// TestGoldenBytes sets all fields of each message, and compares the message's encoding
// with recorded bytes. It also compares the numbers of enums with recorded numbers.
func TestGoldenBytes(t *testing.T) {
	var out strings.Builder
	for i := range files[0].Enums().Len() {
		for values, i := files[0].Enums().Get(i).Values(), 0; i < values.Len(); i++ {
			fmt.Fprintf(&out, "%s.%s = %d\n", values.Get(i).Parent().Name(), values.Get(i).Name(), values.Get(i).Number())
		}
	}
	for _, d := range allMessages() {
		m := filledMessage(d, 0)
		fmt.Fprintf(&out, "%s %x\n", d.FullName(), localv1.Marshal(m))
		for i := range d.Oneofs().Len() {
			choices := d.Oneofs().Get(i).Fields()
			for i := range choices.Len() {
				f := choices.Get(i)
				m.Set(f, filledValue(f, 0))
				fmt.Fprintf(&out, "%s with %s %x\n", d.FullName(), f.Name(), localv1.Marshal(m))
			}
		}
	}
	const path = "testdata/golden.txt"
	if *update {
		if err := os.WriteFile(path, []byte(out.String()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(strings.Split(string(want), "\n"), strings.Split(out.String(), "\n")); diff != "" {
		t.Errorf("the wire format changed (- golden, + now); if this is intended, run go test -update:\n%s", diff)
	}
}

// filledMessage returns a message of type d with every field set. The value of an integer
// field is its field number. In a oneof, only the last field is set.
func filledMessage(d protoreflect.MessageDescriptor, depth int) *dynamicpb.Message {
	m := dynamicpb.NewMessage(d)
	for i := range d.Fields().Len() {
		f := d.Fields().Get(i)
		switch {
		case f.IsMap():
			m.Mutable(f).Map().Set(protoreflect.ValueOfString("key").MapKey(), protoreflect.ValueOfString("value"))
		case f.IsList():
			if depth < 3 {
				m.Mutable(f).List().Append(filledValue(f, depth))
			}
		default:
			m.Set(f, filledValue(f, depth))
		}
	}
	return m
}

func filledValue(f protoreflect.FieldDescriptor, depth int) protoreflect.Value {
	switch f.Kind() {
	case protoreflect.MessageKind:
		return protoreflect.ValueOfMessage(filledMessage(f.Message(), depth+1))
	case protoreflect.EnumKind:
		return protoreflect.ValueOfEnum(f.Enum().Values().Get(1).Number())
	case protoreflect.BoolKind:
		return protoreflect.ValueOfBool(true)
	case protoreflect.Int32Kind:
		return protoreflect.ValueOfInt32(int32(f.Number()))
	case protoreflect.Uint32Kind:
		return protoreflect.ValueOfUint32(uint32(f.Number()))
	case protoreflect.Int64Kind:
		return protoreflect.ValueOfInt64(int64(f.Number()))
	case protoreflect.BytesKind:
		return protoreflect.ValueOfBytes([]byte{byte(f.Number())})
	default:
		return protoreflect.ValueOfString(string(f.Name()))
	}
}
