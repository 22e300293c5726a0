// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"

	"google.golang.org/protobuf/encoding/protowire"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/apis/meta/internalversion"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	utilnet "k8s.io/apimachinery/pkg/util/net"
)

// list requests a list from the API server. The store decodes each object as soon as it
// has arrived, so the memory never holds the whole encoded list. If the answer is not in
// protobuf, decoder decodes the complete answer.
func (src *source) list(ctx context.Context, options *metav1.ListOptions, decoder runtime.Decoder, to objectStore) (runtime.Object, error) {
	body, err := src.stream(ctx, options)
	if err != nil {
		return nil, err
	}
	defer body.Close()
	r := bufio.NewReaderSize(body, 64<<10)
	if start, _ := r.Peek(len(magic)); string(start) != magic {
		all, err := io.ReadAll(r)
		if err != nil {
			return nil, err
		}
		o, err := runtime.Decode(decoder, all)
		if status, ok := o.(*metav1.Status); ok {
			return nil, apierrors.FromObject(status)
		}
		return o, err
	}
	list := &internalversion.List{}
	err = readList(r, to.objectKind(), &list.ListMeta, func(object []byte) {
		list.Items = append(list.Items, to.decode(object))
	})
	if err != nil {
		return nil, fmt.Errorf("read list: %w", err)
	}
	return list, nil
}

// stream sends the request for a list. It tries again if the connection breaks, because
// client-go repeats only requests without a stream.
func (src *source) stream(ctx context.Context, options *metav1.ListOptions) (io.ReadCloser, error) {
	for attempt := 0; ; attempt++ {
		body, err := src.request(options).Stream(ctx)
		broken := utilnet.IsConnectionReset(err) || utilnet.IsProbableEOF(err) || utilnet.IsHTTP2ConnectionLost(err)
		if !broken || attempt == 10 {
			return body, err
		}
		select {
		case <-time.After(time.Second):
		case <-ctx.Done():
			return nil, err
		}
	}
}

// magic is the beginning of an object in Kubernetes' content type protobuf. A message
// of the type runtime.Unknown follows.
const magic = "k8s\x00"

// readList reads a list of objects of a kind, in Kubernetes' content type protobuf. It calls
// the function add with each object. The function must not keep the bytes.
func readList(from *bufio.Reader, kind string, meta *metav1.ListMeta, add func(object []byte)) error {
	r := &wireReader{from: from}
	if _, err := from.Discard(len(magic)); err != nil {
		return err
	}
	var is runtime.TypeMeta
	complete := false
	for {
		tag, err := binary.ReadUvarint(r)
		if err == io.EOF && complete {
			return nil
		}
		if err != nil {
			return noEOF(err)
		}
		switch tag {
		case 1<<3 | delimited: // typeMeta
			err = r.unmarshal(&is)
		case 2<<3 | delimited: // raw
			switch is.Kind {
			case kind + "List":
				err = r.list(meta, add)
				complete = true
			case "Status":
				status := &metav1.Status{}
				err = cmp.Or(r.unmarshal(status), apierrors.FromObject(status))
			default:
				err = fmt.Errorf("the answer is of the kind %q", is.Kind)
			}
		default:
			err = r.skip(tag)
		}
		if err != nil {
			return err
		}
	}
}

// list reads a field whose value is a list. All lists, such as ServiceList, have the same
// two fields: metadata and items.
func (r *wireReader) list(meta *metav1.ListMeta, add func(object []byte)) error {
	length, err := binary.ReadUvarint(r)
	if err != nil {
		return noEOF(err)
	}
	end := r.offset + length
	for r.offset < end {
		tag, err := binary.ReadUvarint(r)
		if err != nil {
			return noEOF(err)
		}
		switch tag {
		case 1<<3 | delimited:
			if err := r.unmarshal(meta); err != nil {
				return err
			}
		case 2<<3 | delimited:
			message, err := r.bytes()
			if err != nil {
				return err
			}
			add(message)
		default:
			if err := r.skip(tag); err != nil {
				return err
			}
		}
	}
	if r.offset != end || length > end { // length > end if the sum of r.offset and length has overflowed
		return errors.New("the length of the list is wrong")
	}
	return nil
}

// wireReader reads the parts of a protobuf message.
type wireReader struct {
	from   *bufio.Reader
	offset uint64
	buffer []byte
}

// ReadByte implements io.ByteReader.
func (r *wireReader) ReadByte() (byte, error) {
	b, err := r.from.ReadByte()
	if err == nil {
		r.offset++
	}
	return b, err
}

// maxObjectSize limits the size of an object and of any other field, in bytes. etcd
// limits objects to 1.5 MiB by default.
const maxObjectSize = 64 << 20

// bytes reads the value of a delimited field. The next call overwrites the result.
func (r *wireReader) bytes() ([]byte, error) {
	length, err := binary.ReadUvarint(r)
	if err != nil {
		return nil, noEOF(err)
	}
	if length > maxObjectSize {
		return nil, fmt.Errorf("a field has %d bytes; the limit is %d", length, maxObjectSize)
	}
	r.buffer = slices.Grow(r.buffer[:0], int(length))[:length]
	n, err := io.ReadFull(r.from, r.buffer)
	r.offset += uint64(n)
	return r.buffer, noEOF(err)
}

// unmarshal reads a field whose value is a message.
func (r *wireReader) unmarshal(to interface{ Unmarshal([]byte) error }) error {
	message, err := r.bytes()
	if err != nil {
		return err
	}
	return to.Unmarshal(message)
}

// skip skips the value of a field.
func (r *wireReader) skip(tag uint64) (err error) {
	switch protowire.Type(tag & 7) {
	case protowire.BytesType:
		_, err = r.bytes()
	case protowire.VarintType:
		_, err = binary.ReadUvarint(r)
	default:
		err = fmt.Errorf("unexpected field with tag %d", tag)
	}
	return noEOF(err)
}

// noEOF returns io.ErrUnexpectedEOF in place of io.EOF.
func noEOF(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}

// objectSerializer is a Serializer for the events of watches. It converts objects to
// items, with the store for their kind.
type objectSerializer struct {
	runtime.Serializer
	stores map[string]objectStore
}

// Decode implements runtime.Decoder. For an object in protobuf whose resource version
// cannot be decoded, it returns a Status. The reflector ignores watch events that contain
// a Status.
func (s objectSerializer) Decode(data []byte, defaults *schema.GroupVersionKind, into runtime.Object) (runtime.Object, *schema.GroupVersionKind, error) {
	if into == nil {
		if kind, object := unwrap(data); s.stores[kind.Kind] != nil {
			o := s.stores[kind.Kind].postpone(object)
			if o.(metav1.ObjectMetaAccessor).GetObjectMeta().GetResourceVersion() == "" {
				o = &metav1.Status{Status: metav1.StatusFailure, Message: "cannot decode " + kind.String()}
			}
			return o, &kind, nil
		}
	}
	o, kind, err := s.Serializer.Decode(data, defaults, into)
	if into == nil && err == nil && s.stores[kind.Kind] != nil {
		o = s.stores[kind.Kind].postponeObject(o)
	}
	return o, kind, err
}

// unwrap returns the kind and the protobuf message of an object in Kubernetes' content
// type protobuf. If data is malformed, the kind is empty.
func unwrap(data []byte) (kind schema.GroupVersionKind, object []byte) {
	message, ok := bytes.CutPrefix(data, []byte(magic))
	for ok && len(message) > 0 {
		f, rest, err := nextField(message)
		if err != nil {
			return schema.GroupVersionKind{}, nil
		}
		message = rest
		switch f.tag {
		case 1<<3 | delimited:
			var t runtime.TypeMeta
			if err := t.Unmarshal(f.bytes); err != nil {
				return schema.GroupVersionKind{}, nil
			}
			kind = schema.FromAPIVersionAndKind(t.APIVersion, t.Kind)
		case 2<<3 | delimited:
			object = f.bytes
		}
	}
	return kind, object
}

// negotiation is a runtime.NegotiatedSerializer whose decoders make items.
type negotiation struct {
	runtime.NegotiatedSerializer
	types []runtime.SerializerInfo
}

// SupportedMediaTypes implements runtime.NegotiatedSerializer.
func (n negotiation) SupportedMediaTypes() []runtime.SerializerInfo { return n.types }

// newNegotiation returns codecs that make items for the stores.
func newNegotiation(codecs runtime.NegotiatedSerializer, stores map[string]objectStore) negotiation {
	n := negotiation{codecs, slices.Clone(codecs.SupportedMediaTypes())}
	for i := range n.types {
		n.types[i].Serializer = objectSerializer{n.types[i].Serializer, stores}
	}
	return n
}
